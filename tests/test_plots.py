"""Pictures: which numbers are drawn, in which panel, under which name, and what is marked."""
import matplotlib.figure
import pytest

import plots

CONFIG = {"env": "bandit", "model": "tiny", "eval_prompts": 256, "lr": 1e-3}


@pytest.fixture
def drawn(monkeypatch, pictures, tmp_path):
    """The figures that were saved."""
    monkeypatch.chdir(tmp_path)
    figures = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig",
                        lambda fig, out, **more: figures.append(fig) or save(fig, out, **more))
    return figures


def run_of(success, k=1, held_out=None, evaluated=1, **settings):
    """An iteration has four updates for each slice, and each `evaluated`-th one an evaluation."""
    rows = [{"iteration": i, "updates": 4 * k, "success": x} for i, x in enumerate(success)]
    for row, share in list(zip(rows, held_out or success))[::evaluated]:
        row["eval"] = {"bandit": share}
    rows[0] = {"iteration": 0, "eval": rows[0]["eval"], "yardsticks": {"bandit": [0.5, 1.0]}}
    return plots.Run(CONFIG | {"online_k": k} | settings, rows)


def solid(ax):  # -> [(x, y, colour, width)] of its lines, without the dotted and dashed ones
    return [(list(line.get_xdata()), pytest.approx(list(line.get_ydata())), line.get_color(),
             line.get_linewidth()) for line in ax.get_lines() if line.get_linestyle() == "-"]


def curves_of(ax):  # -> {label: line}
    return {line.get_label(): line for line in ax.get_lines() if line.get_label()[0] != "_"}


def panel(fig, word):  # the one whose title begins with it
    ax, = (ax for ax in fig.axes if ax.get_title().startswith(word))
    return ax


# ----------------------------------------------------------------------------------------- online-k
def test_online_k_draws_success_against_updates(drawn):
    """Two seeds of k = 1, one of k = 2, whose iterations have twice as many updates. The second
    seed was evaluated half as often, and ended early. So between its evaluations, at 4 updates, it
    counts with (0.4 + 0.8) / 2, and after its last one there is no mean.
    """
    plots.online_k({
        "a": run_of([0, 0], k=2, held_out=[0.4, 0.9], iterations=1, seed=3),
        "b": run_of([0] * 4, held_out=[0.4, 0.5, 0.6, 0.7], iterations=3, seed=1),
        "c": run_of([0] * 3, held_out=[0.4, None, 0.8], evaluated=2, eval_every=2, seed=2),
    }, "out.png")
    ax, = drawn[0].axes
    assert solid(ax) == [
        ([0, 4, 8, 12], [0.4, 0.5, 0.6, 0.7], "C0", 0.7), ([0, 8], [0.4, 0.8], "C0", 0.7),
        ([0, 4, 8], [0.4, 0.55, 0.7], "C0", 2), ([0, 8], [0.4, 0.9], "C1", 2)]
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "k = 1" in names[0] and "2 seeds" in names[0] and "k = 2" in names[1]


@pytest.mark.parametrize("other, says", [
    (run_of([0.1], env="sokoban"), "b differs in env"), (run_of([0.1], lr=3e-3), "b differs in lr"),
    (run_of([0.1], seed=1), "a has no evaluation")])
def test_online_k_refuses_what_it_cannot_compare(other, says, drawn):
    never = run_of([0.1])
    del never.rows[0]["eval"]
    with pytest.raises(ValueError, match=says):
        plots.online_k({"a": run_of([0.1]) if "differs" in says else never, "b": other}, "out.png")


# ----------------------------------------------------------------------------------------- collapse
def test_of_one_run_all_after_the_collapse_is_grey(drawn):
    """From the collapse on, not from the peak on. Of several, each has its own marks: one wins for
    six iterations and collapses in the seventh, the other one stays.
    """
    lost, stays = run_of([0.0] + [1.0] * 6 + [0.0] * 12), run_of([0.0] + [1.0] * 18)
    assert plots.collapse({"StarPO": lost, "StarPO-S": stays}, "both.png") == "both.png"
    plots.collapse({"StarPO": lost}, "one.png")
    assert plots.peak_and_collapse(lost) == (1, 7) and plots.peak_and_collapse(stays) == (1, None)
    for ax, alone in zip(drawn[0].axes, drawn[1].axes):
        marks = [(line.get_linestyle(), line.get_color(), line.get_xdata()[0])
                 for line in ax.get_lines() if line.get_linestyle() != "-"]
        assert marks == [(":", "C0", 1), ("--", "C0", 7), (":", "C1", 1)]
        grey, = alone.patches
        assert grey.get_x() == 7 and grey.get_x() + grey.get_width() == 18
    said = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert said == [f"StarPO: {plots.verdict(lost)}", f"StarPO-S: {plots.verdict(stays)}"]
    with pytest.raises(ValueError, match="no peak"):
        plots.collapse({"a": run_of([0.4])}, "out.png")


def test_the_first_of_equal_peaks_counts():
    """In floating point the mean of one of these windows is a bit larger."""
    window = [0.1, 0.6, 0.5, 0.6, 0.3]
    for first in (window, window[::-1]):
        assert plots.peak_and_collapse(run_of([0, *first, 0, 0, *first[::-1]]))[0] == 1


# ------------------------------------------------------------------------------------------- curves
def test_every_panel_shows_its_own_column_of_its_own_run(drawn):
    runs = {"first": run_of([0, 0.2, 0.3], held_out=[0.4, 0.5, 0.6]),
            "second": run_of([0, 0.7, 0.8], held_out=[0.4, 0.9, 0.95])}
    for shift, run in enumerate(runs.values()):
        for row in run.rows[1:]:
            row |= {"reward": 3.0 + shift, "entropy": 5.0 + shift, "grad_norm": 0.1 + shift,
                    "mine": 7.0 + shift, "policy_loss": 0.1, "said": "text"}
    plots.curves(runs, "out.png")
    fig, = drawn
    found = {}
    for ax in fig.axes:
        first, second = (list(line.get_ydata()) for line in curves_of(ax).values())
        found[ax.get_title().partition("\n")[0]] = pytest.approx(first), pytest.approx(second)
    assert found == {
        "success, bandit": ([0.4, 0.5, 0.6], [0.4, 0.9, 0.95]),
        "success (training)": ([0.2, 0.3], [0.7, 0.8]), "mean return (training)": ([3, 3], [4, 4]),
        "mean gradient norm": ([0.1, 0.1], [1.1, 1.1]), "entropy per token": ([5, 5], [6, 6]),
        "mine": ([7, 7], [8, 8])}
    legend, = fig.legends
    colors = {text.get_text(): line.get_color()
              for text, line in zip(legend.get_texts(), legend.get_lines())}
    assert list(colors) == ["first", "second"]
    for ax in fig.axes:
        assert {label: line.get_color() for label, line in curves_of(ax).items()} == colors
    plots.curves(runs, "out.png", questions={"What is mine?": ("mine", "not logged")})
    assert [ax.get_title() for ax in drawn[1].axes] == ["mine"]


def test_random_and_optimal_play_are_named_where_they_are(drawn):
    plots.curves({"first": run_of([0.4, 0.6]), "second": run_of([0.4, 0.9])}, "out.png")
    named = [(text.get_text().split()[0], text.get_position()[1])
             for text in panel(drawn[0], "success, bandit").texts]
    assert named == [("optimal", 1.0), ("random", 0.5)], "both runs share them"


def test_every_column_of_a_run_has_a_panel(drawn):
    """With a title that says what to expect. (Columns that are counted, not drawn, have none.)"""
    run = run_of([0, 0.5], held_out=[0.4, 0.6])
    run.rows[1] |= dict.fromkeys(plots.TITLES, 0.5) | dict.fromkeys(plots.NOT_DRAWN, 1)
    plots.curves({"a": run}, "out.png")
    titles = [ax.get_title() for ax in drawn[0].axes]
    assert sorted(titles[1:]) == sorted(plots.TITLES.values()) and "bandit" in titles[0]
    assert panel(drawn[0], "log-prob gap")


def test_the_band_is_the_interval_of_as_many_levels(drawn):
    """Wilson's, of 8 in 10: (0.8 + 0.19208 +- 1.96 * sqrt(0.016 + 0.009604)) / 1.38416."""
    assert plots.interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert plots.interval(1.0, 10)[1] == 1.0 and plots.interval(0.0, 10)[0] == pytest.approx(0.0)
    plots.curves({"a": run_of([0.4, 0.6])}, "out.png")
    ax = panel(drawn[0], "success, bandit")
    low, high = ax.collections[0].get_datalim(ax.transData).intervaly
    assert (low, high) == pytest.approx((plots.interval(0.4, 256)[0], plots.interval(0.6, 256)[1]))


def test_every_curve_is_in_view(drawn):
    """Also on a logarithmic axis, which would show nothing if it began below 0."""
    run = run_of([0.4, 0.5, 0.9])
    for row, (norm, kl, gap) in zip(run.rows[1:], ((0.3, -0.1, 1e-6), (40.0, 0.2, 0.05))):
        row |= {"grad_norm": norm, "kl": kl, "logp_gap": gap}
    plots.curves({"a": run}, "out.png")
    scales = [ax.get_yscale() for ax in drawn[0].axes]
    assert scales == ["linear", "linear", "linear", "log", "log"]
    for ax in drawn[0].axes:
        low, high = ax.get_ylim()
        assert all(low < y < high for line in curves_of(ax).values() for y in line.get_ydata())


@pytest.mark.parametrize("draw", [plots.curves, plots.collapse])
def test_forty_runs_can_be_told_apart_and_their_names_cover_nothing(draw, drawn):
    draw({f"runs/a-run-of-seed{i}": run_of([0.1, 0.2]) for i in range(40)}, "out.png")
    fig, = drawn
    styles = {(line.get_color(), line.get_linestyle()) for line in curves_of(fig.axes[-1]).values()}
    assert len(styles) == 40
    names = fig.legends[0].get_window_extent()
    assert names.y0 >= 0
    for ax in fig.axes:
        assert ax.get_tightbbox().y0 >= names.y1 and ax.bbox.height > 1.2 * fig.dpi


def test_the_users_matplotlibrc_changes_nothing(pictures, tmp_path):
    runs = {"a": run_of([0.4, 0.6])}
    plots.curves(runs, tmp_path / "plain.png")
    with matplotlib.rc_context({"text.usetex": True, "figure.autolayout": True, "font.size": 30}):
        plots.curves(runs, tmp_path / "theirs.png")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "theirs.png").read_bytes()


# -------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize("file, text, says", [
    ("log.jsonl", None, "No such file"), ("config.json", None, "No such file"),
    ("log.jsonl", '{"iteration": 0}\n{"iteration": 1, "rew\n{"iteration": 2}\n', "line 2"),
    ("log.jsonl", "{}\n", "no iteration"), ("log.jsonl", "5\n", "log.jsonl"),
    ("config.json", "{}", "a setting is missing"), ("config.json", "[]", "config.json"),
    ("config.json", "no", "config.json")])
def test_broken_folders_are_one_line(file, text, says, tmp_path, monkeypatch, capsys):
    settings = '{"env": "bandit", "model": "tiny", "eval_prompts": 256, "online_k": 1}'
    (tmp_path / "config.json").write_text(settings)
    (tmp_path / "log.jsonl").write_text('{"iteration": 0}\n{"iter')
    assert plots.load(tmp_path).rows == [{"iteration": 0}], "the last line is being written"
    (tmp_path / file).write_text(text) if text else (tmp_path / file).unlink()
    for what in ("curves", "collapse", "online-k"):
        monkeypatch.setattr("sys.argv", ["plots.py", what, str(tmp_path)])
        with pytest.raises(SystemExit) as stop:
            plots.main()
        told = capsys.readouterr().err
        assert stop.value.code == 1 and told.count("\n") == 1
        assert tmp_path.name in told and says in told


def test_labels_are_short_where_they_can_be():
    assert plots.labels_of(["runs/a", "runs/b"]) == {"a": "runs/a", "b": "runs/b"}
    assert list(plots.labels_of(["x/a", "y/a"])) == ["x/a", "y/a"]
