"""extras/warm_start.py: a model learns the form of an answer, and is saved as a plain model."""
import numpy as np
import pytest
import transformers
from test_rollout import bpe  # noqa: F401, a fixture

import envs
import ragen_mini as rm
import runs
from conftest import ROOT
from extras import thoughts, warm_start

pytestmark = pytest.mark.usefixtures("passes_as_before")
SMALL = "--device cpu --max-new-tokens 40 --max-turns 2 --eval-prompts 8".split()


def test_what_is_taught_is_what_the_scripts_say(tok, cfg):
    """All tokens of the answers are taught, no token of the messages. Every answer is valid."""
    trajs = warm_start.demonstrations(
        tok, np.random.default_rng(0), rm.replace(cfg, env="frozenlake"))
    assert len(trajs) == warm_start.EPISODES
    assert all(turn["valid"] for traj in trajs for turn in traj.turns)
    for traj in trajs:
        taught = tok.decode([token for token, mask in zip(traj.ids, traj.mask) if mask])
        # The program writes the first tag, and the model the end of each answer.
        answers = [answer.split() for answer in taught.split("<|im_end|>")[:-1]]
        assert answers == [turn["answer"].removeprefix("<think>").split() for turn in traj.turns]
        assert sum(traj.mask) == sum(turn["tokens"] for turn in traj.turns)


@pytest.mark.parametrize("option", [[], ["--lora"], ["--bf16"]])
def test_tiny_loses_its_invalid_answers(option, tmp_path, capsys):
    if "--lora" in option:
        pytest.importorskip("peft")
    out = tmp_path / "warm"
    warm_start.main(["tiny", str(out), "--env", "frozenlake", "--warm-lr", "3e-3", *SMALL, *option])
    said = capsys.readouterr().out
    before = float(said.split("valid turns ")[1].split()[0])
    assert before < warm_start.ENOUGH
    assert "  random 0." in said, "it was evaluated"
    assert said.endswith(f"python ragen_mini.py --model {out} --env frozenlake\n")
    cfg = rm.parse_config(["--model", str(out), "--env", "frozenlake", *SMALL])
    assert runs.is_tiny(str(out))
    assert warm_start.valid_turns(rm.load_models(cfg), cfg, 99) > before
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert not any("lora" in name for name, _ in again.named_parameters())


def test_the_next_step_of_another_model_is_what_made_smollm2_learn(
        random_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(warm_start, "valid_turns", lambda *_: 1.0)
    out = tmp_path / "warm"
    monkeypatch.setenv("HOME", str(tmp_path))
    warm_start.main([random_folder, "~/warm", "--env", "bandit", *SMALL])
    command = capsys.readouterr().out.split("python ragen_mini.py ")[1].split()
    cfg = rm.parse_config(command)
    assert (cfg.model, cfg.env) == (str(out), "bandit")
    assert (cfg.algo, cfg.adv_norm, cfg.kl_coef, cfg.lr) == ("grpo", "mean", 0.0, 2e-5)


def test_lessons_are_the_first_turns_of_the_planner(cfg, capsys, monkeypatch):
    """All of them say where the goal is. The rate rises for 20 steps, and falls nearly to 0."""
    taught, rates = [], []

    def learn(policy, trajs, optimizer, cfg):
        taught.extend(trajs)
        rates.append(optimizer.param_groups[0]["lr"])
        return 0.0
    monkeypatch.setattr(warm_start, "learn", learn)
    warm_start.teach_planning(rm.load_models(cfg), rm.replace(cfg, env="frozenlake"), 1e-3, 40)
    assert len(taught) == 40 * warm_start.TURNS_OF_A_LESSON
    assert all(len(traj.turns) == 1 for traj in taught)
    assert all("goal" in rm.thought_of(traj.turns[0]) for traj in taught)
    assert rates[0] < rates[19] > rates[-1] > 0 and rates[-1] < 1e-4
    assert "lesson 10: loss 0.00" in capsys.readouterr().out


def board(thought, size, floor):
    """The map that the list of a thought describes, such as "P a1, G b2, O a2. ..." """
    cells = [[floor] * size for _ in range(size)]
    for listed in thought.partition(".")[0].split(","):
        symbol, *names = listed.split()
        for name in names:
            cells[int(name[1:]) - 1]["abcdef".index(name[0])] = symbol
    return "\n".join(" ".join(row) for row in cells)


def with_walls_around(text):
    inner = [line.split()[1:-1] for line in text.splitlines()[1:-1]]
    wall = "#" * (len(inner) + 2)
    rows = [wall, *("#" + "".join(row) + "#" for row in inner), wall]
    return "\n".join(" ".join(row) for row in rows)


@pytest.mark.parametrize("name, size", [("frozenlake", 4), ("sokoban", 6)])
def test_what_is_read_is_the_map(name, size, tok, cfg):
    """From the thought alone the map can be drawn again. All of its claims are true."""
    cfg = rm.replace(cfg, env=name)
    maps = warm_start.maps_to_read(np.random.default_rng(2), tok, cfg)
    assert len(maps) == warm_start.MAPS_OF_A_LESSON
    for traj in maps:
        thought = warm_start.reading(traj.env)
        drawn = board(thought, size, "_")
        if name == "sokoban":
            drawn = with_walls_around(drawn)
        # On a target, it is named as you and as the target.
        assert drawn.replace("O", "S" if "S" in traj.env.render() else "O") == traj.env.render()
        claims = thoughts.claims_of(thought, *thoughts.facts_of(traj.env))
        assert len(claims) == {"frozenlake": 1, "sokoban": 2}[name]
        assert all(is_true for _, is_true in claims)
        read = [token for token, mask in zip(traj.ids, traj.mask) if mask]
        assert tok.decode(read).split() == tok.decode(tok(thought).input_ids).split()


def test_who_reads_aloud_acts_like_the_planner(cfg):
    """Without slips, the moves are a way to the goal, or the beginning of one. They end no game."""
    rng = np.random.default_rng(3)
    for seed in range(300, 340):
        lake = envs.FrozenLake(success_rate=1.0)
        lake.reset(seed)
        _, moves = warm_start.reader(lake, 10, rng)
        assert 1 <= len(moves) <= 5
        for move in moves:
            lake.step(move)
        assert lake.state not in lake.level["holes"]
        sokoban = envs.Sokoban()
        sokoban.reset(seed)
        _, moves = warm_start.reader(sokoban, 10, rng)
        for move in moves:
            sokoban.step(move)
        assert sokoban.won(sokoban.state)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name, size", [("frozenlake", 4), ("sokoban", 6)])
def test_moves_are_random_and_readings_are_not(
        name, size, share, bpe, cfg, monkeypatch):  # noqa: F811
    """In all turns of whole episodes the thought is the map that was shown. That share of the moves
    is drawn from all four. The others are the planner's, who wins on Sokoban if he is alone.
    """
    asked = []

    def planner(*args):
        asked.append(args)
        return warm_start.reader(*args)
    monkeypatch.setattr(warm_start.cold_start, "planner", planner)
    monkeypatch.setattr(warm_start.cold_start, "guess", warm_start.reader_at_random)
    cfg = rm.replace(cfg, env=name)
    rng = np.random.default_rng(4)
    trajs = [traj for _ in range(8)
             for traj in warm_start.episodes_with_random_moves(share, rng, bpe, cfg)]
    assert len(trajs) == 8 * warm_start.EPISODES_OF_A_LESSON
    turns = [turn for traj in trajs for turn in traj.turns]
    for turn in turns:
        read = board(rm.thought_of(turn), size, "_")
        read = with_walls_around(read) if name == "sokoban" else read
        assert read.replace("O", "S" if "S" in turn["state"] else "O") == turn["state"]
    assert len(asked) / len(turns) == pytest.approx(1 - share, abs=0.1)
    if share == 1:
        assert any(len(traj.turns) > 1 for traj in trajs)
        moves = [move.strip() for turn in turns
                 for move in turn["answer"].split("<answer>")[1].split("<")[0].split("||")]
        for move in trajs[0].env.actions:
            assert moves.count(move) / len(moves) == pytest.approx(0.25, abs=0.06)
    if share == 0 and name == "sokoban":
        assert all(traj.success for traj in trajs)


def test_an_environment_without_a_planner_and_another_tokenizer(bpe, cfg):  # noqa: F811
    cfg = rm.replace(cfg, env=f"{ROOT}/extras/my_world.py:Guess")
    trajs = warm_start.demonstrations(bpe, np.random.default_rng(1), cfg)
    assert all(turn["valid"] for traj in trajs for turn in traj.turns)


def test_too_few_steps_save_nothing(random_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "STEPS", 1)
    with pytest.raises(SystemExit, match="1 steps were too few.* 0.00 .*Nothing was saved"):
        warm_start.main([random_folder, str(tmp_path / "out"), "--env", "bandit", *SMALL])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words, says", [
    ("tiny . --env bandit", "exists"),
    ("--env bandit tiny out", "come first"),
    ("tiny --env bandit", "come first"),
    ("tiny out --lr 1e-3", "--lr has no effect"),
    ("tiny out --warm-lr 0", "--warm-lr"),
    ("tiny ~ --env bandit", "exists"),  # in quotes, so that the shell leaves it
    ("nowhere a/b/../out --env bandit", "--model nowhere"),
    ("tiny out --reading -1", "--reading is -1"),
    ("tiny out --reading 3 --random-moves 0.5", "--random-moves is about the lessons"),
    ("tiny out --reading 3 --lessons 3 --random-moves 70", "--random-moves is 70"),
    ("tiny out --reading 3 --env bandit", "--reading is for .*, not for bandit"),
    ("tiny out --reading 3 --env sokoban --no-think", "--reading is for thoughts"),
    (f"tiny out --reading 3 --env {ROOT}/extras/told_lake.py:ToldLake", "not for ToldLake"),
    (f"tiny out --lessons 3 --env {ROOT}/extras/my_world.py:Guess", "no planner for Guess")])
def test_mistakes_are_named(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=says):
        warm_start.main(words.split())
    assert list(tmp_path.iterdir()) == []
