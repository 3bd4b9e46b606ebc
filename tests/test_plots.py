"""Pictures: which numbers are drawn, in which panel, under which name, and what is marked."""
import matplotlib.figure
import pytest

import plots


@pytest.fixture
def drawn(monkeypatch, pictures):
    """The figures that were saved, without files."""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda fig, out, **_: figures.append(fig))
    return figures


def run_of(k, success, updates, env="bandit", model="tiny", held_out=None):
    """Evaluated before training and after each iteration, which has k times as many updates."""
    held_out = held_out or success
    rows = [{"iteration": 0, "eval": {env: held_out[0]}, "yardsticks": {env: [0.5, 1.0]}}]
    for i in range(1, len(success)):
        rows.append({"iteration": i, "updates": k * updates, "success": success[i], "eval": {env: held_out[i]}})
    config = {"env": env, "model": model, "online_k": k, "algo": "ppo", "starpo_s": False, "eval_prompts": 256}
    return plots.Run(config, rows)


def curves_of(ax):  # the thick lines, which have labels
    return {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}


def lines_of(ax):  # without the dotted and dashed ones
    return [line for line in ax.get_lines() if line.get_linestyle() == "-"]


# ----------------------------------------------------------------------------------------- online-k
def test_online_k_draws_success_against_updates(drawn):
    """Two seeds of k = 1, one of k = 2. After two iterations of four updates k = 1 stands where k = 2 does after one."""
    runs = {"a": run_of(2, [0.4, 0.9], 4), "b": run_of(1, [0.4, 0.5, 0.6], 4), "c": run_of(1, [0.4, 0.7, 0.8], 4)}
    plots.online_k(runs, "out.png")
    ax, = drawn[0].axes
    seed, other_seed, mean, of_two = lines_of(ax)
    assert list(seed.get_ydata()) == [0.4, 0.5, 0.6] and list(other_seed.get_ydata()) == [0.4, 0.7, 0.8]
    assert mean.get_xdata().tolist() == [0, 4, 8] and mean.get_ydata() == pytest.approx([0.4, 0.6, 0.7])
    assert of_two.get_xdata().tolist() == [0, 8] and of_two.get_ydata() == pytest.approx([0.4, 0.9])
    assert seed.get_linewidth() < mean.get_linewidth()
    assert seed.get_color() == mean.get_color() != of_two.get_color()
    one, two = ax.get_legend().get_texts()
    assert "k = 1" in one.get_text() and "2 seeds" in one.get_text() and "k = 2" in two.get_text()


def test_online_k_draws_held_out_levels_not_training(drawn):
    plots.online_k({"a": run_of(1, [0.1, 0.2, 0.3], 4, held_out=[0.4, 0.5, 0.6])}, "out.png")
    assert lines_of(drawn[0].axes[0])[-1].get_ydata() == pytest.approx([0.4, 0.5, 0.6])


def test_a_seed_that_ended_early_shortens_the_mean(drawn):
    plots.online_k({"a": run_of(1, [0.4, 0.5, 0.6], 4), "b": run_of(1, [0.2, 0.3], 4)}, "out.png")
    assert lines_of(drawn[0].axes[0])[-1].get_ydata() == pytest.approx([0.3, 0.4])


def test_online_k_refuses_what_it_cannot_compare(drawn):
    with pytest.raises(ValueError):
        plots.online_k({"a": run_of(1, [0.1], 1), "b": run_of(1, [0.1], 1, env="sokoban")}, "out.png")
    never = run_of(1, [0.1], 1)
    del never.rows[0]["eval"]
    with pytest.raises(ValueError, match="a has no evaluation"):
        plots.online_k({"a": never}, "out.png")


# ----------------------------------------------------------------------------------------- collapse
def test_each_of_several_runs_has_its_own_marks(drawn):
    """One wins for six iterations and collapses in the seventh, the other one stays."""
    lost, kept = run_of(1, [0.0] + [1.0] * 6 + [0.0] * 12, 4), run_of(1, [0.0] + [1.0] * 18, 4)
    assert plots.collapse({"StarPO": lost, "StarPO-S": kept}, "both.png") == "both.png"
    assert plots.peak_and_collapse(lost) == (1, 7) and plots.peak_and_collapse(kept) == (1, None)
    for ax in drawn[0].axes:
        marks = [(line.get_linestyle(), line.get_color(), line.get_xdata()[0])
                 for line in ax.get_lines() if line.get_linestyle() != "-"]
        assert marks == [(":", "C0", 1), ("--", "C0", 7), (":", "C1", 1)]


def test_of_one_run_all_after_the_collapse_is_grey(drawn):
    """From the collapse on, not from the peak on."""
    plots.collapse({"a": run_of(1, [0.0] + [1.0] * 6 + [0.0] * 12, 4)}, "out.png")
    for ax in drawn[0].axes:
        grey, = ax.patches
        assert grey.get_x() == 7 and grey.get_x() + grey.get_width() == 18


def test_a_run_without_an_iteration_has_no_peak(drawn):
    with pytest.raises(ValueError):
        plots.collapse({"a": run_of(1, [0.4], 4)}, "out.png")


# ------------------------------------------------------------------------------------------- curves
def panel(fig, word):  # the one whose title begins with it
    ax, = (ax for ax in fig.axes if ax.get_title().startswith(word))
    return ax


@pytest.fixture
def two_runs():
    a = run_of(1, [0.1, 0.2, 0.3], 4, held_out=[0.4, 0.5, 0.6])
    b = run_of(1, [0.1, 0.7, 0.8], 4, held_out=[0.4, 0.9, 0.95])
    for shift, run in enumerate((a, b)):
        for row in run.rows[1:]:
            row |= {"reward": 3.0 + shift, "entropy": 5.0 + shift, "grad_norm": 0.1 + shift}
    return {"first": a, "second": b}


def test_every_panel_shows_its_own_column_of_its_own_run(drawn, two_runs):
    plots.curves(two_runs, "out.png")
    fig, = drawn
    assert panel(fig, "success, bandit") is not panel(fig, "success (training)")
    for word, first, second in (("success (training)", [0.2, 0.3], [0.7, 0.8]),
                                ("success, bandit", [0.4, 0.5, 0.6], [0.4, 0.9, 0.95]),
                                ("mean return", [3.0, 3.0], [4.0, 4.0]), ("entropy", [5.0, 5.0], [6.0, 6.0]),
                                ("mean gradient", [0.1, 0.1], [1.1, 1.1])):
        drawn_curves = curves_of(panel(fig, word))
        assert list(drawn_curves) == ["first", "second"]
        assert drawn_curves["first"].get_ydata() == pytest.approx(first)
        assert drawn_curves["second"].get_ydata() == pytest.approx(second)
    legend, = fig.legends
    colors = {text.get_text(): line.get_color() for text, line in zip(legend.get_texts(), legend.get_lines())}
    for ax in fig.axes:
        assert {label: line.get_color() for label, line in curves_of(ax).items()} == colors


def test_random_and_optimal_play_are_named_where_they_are(drawn, two_runs):
    plots.curves(two_runs, "out.png")
    ax = panel(drawn[0], "success, bandit")
    named = {text.get_text().split()[0]: text.get_position()[1] for text in ax.texts}
    assert named == {"random": 0.5, "optimal": 1.0} and len(ax.texts) == 2, "both runs share them"


def test_the_band_is_the_interval_of_as_many_levels(drawn, two_runs):
    plots.curves({"first": two_runs["first"]}, "out.png")
    band, = panel(drawn[0], "success, bandit").collections
    low, high = band.get_datalim(panel(drawn[0], "success, bandit").transData).intervaly
    assert low == pytest.approx(plots.interval(0.4, 256)[0]) and high == pytest.approx(plots.interval(0.6, 256)[1])


def test_every_curve_is_in_view(drawn):
    """Gradients on a logarithmic axis, too, where an axis that begins below 0 would show nothing."""
    run = run_of(1, [0.4, 0.5, 0.9], 4)
    for row, (norm, kl) in zip(run.rows[1:], ((0.3, -0.1), (40.0, 0.2))):
        row |= {"grad_norm": norm, "kl": kl}
    plots.curves({"a": run}, "out.png")
    axes = drawn[0].axes
    assert [ax.get_yscale() for ax in axes] == ["linear", "linear", "linear", "log"]
    for ax in axes:
        low, high = ax.get_ylim()
        assert all(low < y < high for line in lines_of(ax) for y in line.get_ydata()), ax.get_title()


def test_more_runs_than_colours_can_be_told_apart(drawn):
    plots.curves({str(i): run_of(1, [0.1, 0.2], 4) for i in range(14)}, "out.png")
    styles = [(line.get_color(), line.get_linestyle()) for line in curves_of(drawn[0].axes[-1]).values()]
    assert len(set(styles)) == 14


def test_a_column_of_your_own_is_drawn_under_its_name(drawn):
    run = run_of(1, [0.1, 0.2, 0.3], 4)
    for row in run.rows[1:]:
        row["mine"] = 7.0
    plots.curves({"a": run}, "out.png", questions={"What is mine?": ("mine", "not logged")})
    ax, = drawn[0].axes
    assert ax.get_title() == "mine" and list(curves_of(ax)["a"].get_ydata()) == [7.0, 7.0]


def test_the_running_median_drops_a_spike_and_keeps_a_fall():
    assert plots.running_median([0, 0, 9, 0, 0]) == [0, 0, 0, 0, 0]
    assert plots.running_median([1, 1, 1, 0, 0, 0]) == [1, 1, 1, 0, 0, 0]


def test_intervals_by_hand():
    """Wilson's, of 8 in 10: (0.8 + 0.19208 +- 1.96 * sqrt(0.016 + 0.009604)) / 1.38416."""
    low, high = plots.interval(0.8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert plots.interval(1.0, 10)[1] == 1.0 and plots.interval(0.0, 10)[0] == pytest.approx(0.0)


# -------------------------------------------------------------------------------- the command line
def test_broken_folders_are_one_line(tmp_path, monkeypatch, capsys):
    files = {"config.json": '{"env": "bandit", "model": "tiny"}', "log.jsonl": '{"iteration": 0}\n'}
    for name, text in (("log.jsonl", None), ("config.json", None), ("log.jsonl", "{}\nx\n{}\n"), ("config.json", "{}"),
                       ("config.json", "[]"), ("config.json", "no")):
        for file in files:
            (tmp_path / file).write_text(files[file])
        (tmp_path / name).write_text(text) if text is not None else (tmp_path / name).unlink()
        for what in ("curves", "collapse", "online-k"):
            monkeypatch.setattr("sys.argv", ["plots.py", what, str(tmp_path)])
            with pytest.raises(SystemExit) as stop:
                plots.main()
            assert stop.value.code == 1
            told = capsys.readouterr().err
            assert told.count("\n") == 1 and tmp_path.name in told


def test_labels_are_short_where_they_can_be():
    assert plots.labels_of(["runs/a", "runs/b"]) == {"a": "runs/a", "b": "runs/b"}
    assert list(plots.labels_of(["x/a", "y/a"])) == ["x/a", "y/a"]
