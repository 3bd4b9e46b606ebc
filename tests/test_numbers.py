"""Each number of a page is in a committed log: one table of texts, made from the logs."""
import re

import pytest
import transformers

import plots
from conftest import ROOT
from support import loading


def texts():  # -> [(page, a text that must stand in it), ...]
    rows = plots.load(ROOT / "figures/first-command").rows
    random, optimal = rows[0]["yardsticks"]["frozenlake"]
    found = []
    for i in (0, 30, 60):
        success = plots.with_interval(rows[i]["eval"]["frozenlake"], 256)
        found.append(("README.md", f"iteration {i}: frozenlake {success}  "
                                   f"random {random:.2f}  optimal {optimal:.2f}"))
    for column in ("thoughts_goal", "true_goal"):
        before, after = rows[0][column], rows[60][column]
        found.append(("README.md", f"{before:.2f} before, {after:.2f} after"))
    seconds = sum(row["seconds_rollout"] + row["seconds_update"] for row in rows[1:])
    assert 120 < seconds < 180
    found.append(("README.md", "about two and a half minutes on one CPU core"))

    policy = transformers.AutoModelForCausalLM.from_pretrained(loading.TINY)
    size = f"{policy.num_parameters() / 1e6:.2f} million parameters"
    found += [("README.md", size), ("tiny/README.md", size)]

    gpu = (ROOT / "figures/gpu.txt").read_text()
    for algo, name in (("ppo", "PPO with KL penalty took {} seconds on an H200 and {} GB"),
                       ("grpo", "GRPO without it {} seconds and {} GB")):
        seconds, gib = re.search(rf"^\| {algo} \| (\S+) s \|.* (\S+) GiB \|$", gpu, re.M).groups()
        gb = float(gib) * 1.024 ** 3
        found.append(("README.md", name.format(round(float(seconds) + 0.01), round(gb))))
        found.append(("extras/README.md", f"| {seconds} s |"))
        found.append(("extras/README.md", f"| {gib} GiB |"))
    return found


@pytest.mark.parametrize("page, text", texts())
def test_the_page_says_what_the_logs_say(page, text):
    assert text in (ROOT / page).read_text()
