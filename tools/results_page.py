"""Prints the tables of docs/results.md that come from docs/results/*.csv into the page.

    python tools/results_page.py            # writes them, between `<!-- table NAME -->` and `<!-- end of table -->`
    python tools/results_page.py --check    # names those that differ from the csv files; exit code 1

Invariant: every figure of such a table is computed here from lines of the csv files (a line per run); none is typed.
"""

from __future__ import annotations

import argparse
import csv
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from tba.evaluation.estimators import difference_of_means
from tba.evaluation.student_t import quantile
from tba.research.comparison import verdict
from tba.research.studies._base import RATES

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
BLOCK = re.compile(r"(?<=<!-- table )([\w-]+)( -->\n\n)(.*?)(?=\n\n<!-- end of table -->)", flags=re.DOTALL)

Run = dict[str, str]
Runs = Sequence[Run]
Lines = list[list[str]]

ACCURACY, FALL, MARGIN = "pass@1/sampled", "fall", 0.03
NAMES = {
    "tb": "Trajectory Balance without correction",
    "tb-corrected": "Trajectory Balance, truncated ratio (cap 1)",
    "tba-prime": "TBA'",
    "prox-rloo": "Proximal RLOO",
    "ppo": "PPO",
    "grpo": "GRPO",
    "dr-grpo": "Dr. GRPO",
    "online-dpo": "Online DPO",
    "rloo": "RLOO, the pull to the reference in its reward",
    "reinforce": "REINFORCE without a baseline",
    "raft": "RAFT (no pull to the reference)",
    "tb-learned-z": "Trajectory Balance, log Z learned",
    "subtb": "sub-trajectory balance",
}


@functools.cache
def study(name: str) -> dict[str, list[Run]]:
    """The runs of a csv file by variant, in the order of the file."""
    found: dict[str, list[Run]] = {}
    with (PAGE.parent / "results" / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        for run in csv.DictReader(lines):
            found.setdefault(run["variant"], []).append(run)
    return found


def values(runs: Runs, name: str, scale: float = 1.0) -> list[float]:
    """A figure of the runs that have it."""
    return [scale * float(run[name]) for run in runs if run[name]]


def plain(runs: Runs, name: str, digits: int, scale: float = 1.0) -> str:
    """The mean over seeds."""
    return f"{mean(values(runs, name, scale)):.{digits}f}"


def spread(runs: Runs, name: str, digits: int = 1, scale: float = 1.0) -> str:
    """Mean ± standard deviation over seeds, and of how many runs where not all have it."""
    found = values(runs, name, scale)
    text = f"{mean(found):.{digits}f}" + (f" ± {stdev(found):.{digits}f}" if len(found) > 1 else "")
    return text if len(found) == len(runs) else f"{text} ({len(found)} of {len(runs)})"


def accuracy(runs: Runs) -> str:
    return spread(runs, ACCURACY, 1, 100)


def worst(runs: Runs) -> str:
    """The accuracy of the worst seed."""
    return f"{100 * min(values(runs, ACCURACY)):.1f}"


def fall(runs: Runs) -> str:
    """The largest fall of any seed below its own best, over the evaluations of a run, in points."""
    return f"{100 * max(values(runs, FALL)):.1f}"


def each(runs: Runs, name: str, scale: float = 100.0, digits: int = 1) -> str:
    """The figure of every seed, in their order."""
    return ", ".join(f"{value:.{digits}f}" for value in values(runs, name, scale))


def brief(runs: Runs) -> str:
    """`94.4 ± 0.5 (93.8; 12.0)`: final accuracy (worst seed; largest fall)."""
    return f"{accuracy(runs)} ({worst(runs)}; {fall(runs)})"


def against(runs: Runs, baseline: Runs, name: str = ACCURACY) -> str:
    """The difference of accuracies (or of another share) to a baseline, in points, with its 95 % interval (Welch)."""
    found = difference_of_means(values(baseline, name, 100), values(runs, name, 100))
    return f"{found.estimate:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def thousands(runs: Runs, name: str) -> str:
    return f"{mean(values(runs, name)) / 1000:.0f}k"


def mebibytes(runs: Runs, name: str) -> str:
    return f"{mean(values(runs, name)) / 2**20:.0f}"


def seconds(runs: Runs, name: str) -> str:
    return spread(runs, name, 1)


def staleness() -> Lines:
    found, rows = study("staleness"), []
    for name in ("tb-corrected", "tba-prime", "prox-rloo", "ppo", "grpo", "dr-grpo", "online-dpo", "tb"):
        fresh, stale = found[f"{name}-sync"], found[f"{name}-k10"]
        difference = difference_of_means(values(fresh, ACCURACY), values(stale, ACCURACY))
        rows.append(
            [
                NAMES[name],
                str(len(stale)),
                accuracy(fresh),
                worst(fresh),
                fall(fresh),
                accuracy(stale),
                worst(stale),
                fall(stale),
                against(stale, fresh),
                verdict(difference, MARGIN),
                plain(stale, "kl", 2),
                mebibytes(stale, "trainer_memory"),
                thousands(stale, "tokens_trained"),
            ]
        )
    head = ["objective", "seeds", "on-policy", "worst seed", "largest fall", "stale", "worst seed", "largest fall"]
    head += ["difference [95 % interval]", "not worse by 3 points", "KL to the reference, nats, stale"]
    return [[*head, "peak memory, MiB", "tokens trained"], *rows]


def staleness_by_k() -> Lines:
    found, settings = study("staleness"), ("sync", "k1", "k2", "k4", "k10", "k16")
    rows = [
        [NAMES[name]] + [brief(found[f"{name}-{k}"]) if f"{name}-{k}" in found else "" for k in settings]
        for name in ("tb-corrected", "tba-prime", "grpo", "tb")
    ]
    lags = ["mean lag, updates"] + [
        plain([run for name in NAMES for run in found.get(f"{name}-{k}", ())], "lag", 1) for k in settings
    ]
    return [["final accuracy, %", "on-policy", "k = 1", "2", "4", "10", "16"], *rows, lags]


def correction() -> Lines:
    found, rows = study("correction"), []
    names = {"tb": "Trajectory Balance", "rloo": "RLOO", "grpo": NAMES["grpo"], "reinforce": NAMES["reinforce"]}
    for name, said in names.items():
        fresh = found[f"{name}-sync"]
        forms = [found[f"{name}-{form}"] for form in ("none", "token", "sequence")]
        rows.append([said, brief(fresh), *(f"{brief(runs)}: {against(runs, fresh)}" for runs in forms)])
    return [["objective", "on-policy", "none", "by token", "by sequence"], *rows]


def wall_clock() -> Lines:
    found, rows = study("wall_clock"), []
    names = {
        "tba-prime-async": "TBA', asynchronous",
        "tba-prime-async-250": "the same, 250 updates",
        "tba-prime-async-300": "the same, 300 updates",
        "tb-corrected-async": "Trajectory Balance (truncated ratio), asynchronous",
        "tb-corrected-async-250": "the same, 250 updates",
        "tb-corrected-async-300": "the same, 300 updates",
        "ppo-async": "PPO, asynchronous",
        "grpo-async": "GRPO, asynchronous",
        "online-dpo-async": "Online DPO, asynchronous",
        "tb-sync": "Trajectory Balance, synchronous",
        "grpo-sync": "GRPO, synchronous",
        "dr-grpo-sync": "Dr. GRPO, synchronous",
        "ppo-sync": "PPO, synchronous",
        "vine-ppo-sync": "VinePPO, synchronous",
    }
    for name, said in names.items():
        runs = found[name]
        step = mean(1000 * float(run["seconds"]) / float(run["steps"]) for run in runs)
        memory = mebibytes(runs, "trainer_memory")
        memory += f" + {mebibytes(runs, 'searcher_memory')}" if "async" in name else ""
        rows.append(
            [
                said,
                seconds(runs, "seconds_to_target"),
                seconds(runs, "seconds"),
                f"{step:.0f}",
                accuracy(runs),
                worst(runs),
                fall(runs),
                plain(runs, "uses", 1),
                memory,
            ]
        )
    head = ["variant", "seconds to 80 %", "seconds in all", "ms per update", "final accuracy, %", "worst seed"]
    return [[*head, "largest fall, points", "mean uses", "peak memory, MiB"], *rows]


def recent() -> Lines:
    """The quickstart before and after *recent* was by arrival."""
    cases = {
        "plain": "as it is",
        "ratio": "with a truncated ratio",
        "slow": "searchers 5 times slower",
        "slowratio": "slower, with a truncated ratio",
    }
    figures = (("recent", 1, 100.0), ("lag", 1, 1.0), ("ess", 2, 1.0), ("lowest_reward", 2, 1.0))
    figures = (*figures, ("lowest_accuracy", 1, 100.0))
    rows = []
    for case, name in cases.items():
        for code in ("before", "after", "default"):
            if (runs := study("recent").get(f"{case}-{code}")) is None:
                continue
            found = values(runs, "accuracy", 100.0)
            each_one = f"{mean(found):.1f} ({min(found):.1f} to {max(found):.1f})"
            figure = [plain(runs, what, digits, scale) for what, digits, scale in figures]
            said = "after, the default form" if code == "default" else code
            rows.append([name, said, str(len(runs)), *figure, each_one, plain(runs, "uses", 1)])
    head = ["quickstart", "recent by arrival", "seeds", "groups of the newest, %", "lag", "effective sample size"]
    head += ["lowest mean reward of ten steps", "lowest accuracy of an evaluation"]
    return [[*head, "accuracy at the end (lowest to highest)", "mean uses"], *rows]


def wall_clock_by_arrival() -> Lines:
    """Asynchronous runs of the study wall_clock, before and after *recent* was by arrival; seconds apart."""
    rows = []
    before, after = study("wall_clock"), study("wall_clock_by_arrival")
    for variant in after:
        pair = [before[variant], after[variant]]
        cells = [f(p) for f in (accuracy, worst, fall) for p in pair]
        rows.append([f"`{variant}`", *cells, *(plain(p, "lag", 1) for p in pair), *(plain(p, "ess", 2) for p in pair)])
    names = ("final accuracy, %", "worst seed", "largest fall", "lag", "effective sample size")
    return [["variant", *(f"{name}: {code}" for name in names for code in ("before", "after"))], *rows]


def form_noise() -> Lines:
    """By data, the largest distance of a form from the optimum over rewards and K."""
    names = {"none": "", "exact": "", "asymmetric": " (default)", "tapered": "", "lowered": " (log Z low)"}
    data = {
        "fresh": "",
        "stale": " by 10 updates",
        "fixed_9": ": 90 % risky",
        "fixed_1": ": 10 % risky",
        "distinct": "",
        "selected": " by reward",
    }
    rows = []
    for name, more in data.items():
        found = [[float(r["bias"]) for r in study("form_noise")[form] if r["data"] == name] for form in names]
        rows.append(
            [name.split("_")[0] + more, *(f"{max(own, key=abs):.3f}".replace("-0.000", "0.000") for own in found)]
        )
    return [["data", *(f"`{name}`{more}" for name, more in names.items())], *rows]


def asymmetric() -> Lines:
    """The default on sums, one run a row, with the other forms of the same seed."""
    others = {
        "exact": "tb-weighted",
        "log Z low": "tb-robust",
        "the paper's form": "tb",
        "RAFT": "raft",
        "GRPO": "grpo",
    }
    rows = []
    for variant, runs in study("asymmetric").items():
        k = variant.rsplit("-", 1)[1]
        for run in runs:
            same = [
                next(r for r in study("stability")[f"{o}-{k}"] if r["seed"] == run["seed"]) for o in others.values()
            ]
            cells = [f"{100 * float(r[ACCURACY]):.1f} ({100 * float(r[FALL]):.1f})" for r in (run, *same)]
            rows.append([k[1:], run["seed"], *cells])
    return [["k", "seed", "`asymmetric`", *others], *rows]


def wall_clock_ratio() -> Lines:
    """Trajectory Balance with and without a ratio, before and after *recent* was by arrival; one machine."""
    names = {
        "tb-async": "the paper's form (without a ratio)",
        "tb-corrected-async": "with a truncated ratio",
        "tb-robust-async": "the default form then (log Z low)",
    }
    rows = []
    for variant, said in names.items():
        for code, csv_file in (("before", "wall_clock_ratio_before"), ("after", "wall_clock_ratio")):
            if runs := study(csv_file).get(variant):
                cells = [accuracy(runs), worst(runs), fall(runs), seconds(runs, "seconds_to_target")]
                figures = [plain(runs, "lag", 1), plain(runs, "ess", 2), plain(runs, "uses", 1)]
                rows.append([said, code, *cells, *figures])
    head = ["variant", "recent by arrival", "final accuracy, %", "worst seed", "largest fall, points"]
    return [[*head, "seconds to 80 %", "lag", "effective sample size", "mean uses"], *rows]


def wall_clock_objectives() -> Lines:
    names = {
        "tb-robust": "Trajectory Balance, log Z low (the default then)",
        "tb-weighted": "Trajectory Balance, exact",
    }
    found, rows = study("wall_clock_objectives"), []
    for variant, runs in found.items():
        name = variant.removesuffix("-async")
        said = (names | NAMES)[name]
        to = ", ".join(f"{float(run['seconds_to_target']):.1f}" if run["seconds_to_target"] else "-" for run in runs)
        rows.append(
            [
                *(said, f"{RATES[name].stale:g}", to, accuracy(runs), worst(runs), fall(runs)),
                *(plain(runs, "lag", 0), plain(runs, "uses", 1), seconds(runs, "seconds")),
            ]
        )
    rows.sort(key=lambda row: mean(float(x) if x != "-" else 99.0 for x in row[2].split(", ")))
    head = ["objective", "rate", "seconds to 80 %, each seed", "final accuracy, %", "worst seed"]
    return [[*head, "largest fall, points", "mean lag", "mean uses", "seconds in all"], *rows]


def tuning() -> Lines:
    found, rows = study("tuning"), []
    for name, said in NAMES.items():
        cells = []
        for how in ("sync", "k10"):
            runs = [found[f"{name}-{how}-{rate}"] for rate in ("3e-05", "0.0001", "0.0003")]
            best = max(float(r[0][ACCURACY]) for r in runs)
            told = [f"**{accuracy(r)}**" if float(r[0][ACCURACY]) == best else accuracy(r) for r in runs]
            cells += [f"{text} ({fall(r)})" for text, r in zip(told, runs, strict=True)]
        rows.append([said, *cells])
    return [["objective", "on-policy 3e-5", "1e-4", "3e-4", "stale 3e-5", "1e-4", "3e-4"], *rows]


def stable() -> Lines:
    names = {
        "tb": "Trajectory Balance without correction",
        "tb-corrected": "weighted by min(rho, 1), centred without weights",
        "w-ratio": "weighted by min(rho, 1), centred with the weights",
        "w-ratio-2": "min(rho, 2)",
        "w-ratio-8": "min(rho, 8)",
        "w-ratio-norm": "min(rho, 1), divided by their mean in the group",
        "w-ratio-8-norm": "min(rho, 8), divided by their mean in the group",
        "w-mean-ratio": "min(rho^(1/tokens), 1)",
        "w-root-ratio": "min(rho^(1/root of tokens), 1)",
        "w-taper": "min(rho, 1) for answers worse than their group, else 1",
        "w-untaper": "min(rho, 1) for answers better than their group, else 1",
        "w-band": "VESPO's band, at least 0.01",
        "tb-clamp-token": "min(rho, 8) by token, no gradient above it",
        "tb-clip-token": "PPO's clip by token",
        "tb-clip-sequence": "PPO's clip by answer",
        "bound-0.5": "no weights, advantages within 0.5",
        "huber-1": "no weights, Huber's loss",
        "w-ratio-8-huber": "min(rho, 8), Huber's loss",
        "ess-loss": "no weights, loss times the root of the effective sample size",
        "w-ratio-ess": "min(rho, 1), loss times the root of the effective sample size",
        "log-ratio-5": "no weights, log-ratio to the reference within 5",
        "clip-median": "no weights, gradient clipped at the median of the last 50 norms",
        "clip-tenth": "no weights, gradient clipped at their first tenth",
        "w-ratio-clip": "min(rho, 1), gradient clipped at their median",
        "w-ratio-8-clip": "min(rho, 8), gradient clipped at their median",
        "betas-0.95": "no weights, AdamW's second beta 0.95",
        "betas-0.99": "no weights, AdamW's second beta 0.99",
        "w-ratio-0.95": "min(rho, 1), AdamW's second beta 0.95",
        "w-ratio-8-0.95": "min(rho, 8), AdamW's second beta 0.95",
        "spread-0.5": "min(rho, 8), divided by their mean, log rho spread by at most 0.5 nats in a group",
        "spread-1": "at most 1",
        "spread-2": "at most 2",
        "shift-0.25": "min(rho, 8), divided by their mean, log Z lower by 0.25 standard deviations of the group",
        "shift-0.5": "by 0.5",
        "shift-1": "by 1",
        "shift-2": "by 2",
        "shift-4": "by 4",
        "shift-1-unnormalised": "by 1, weights not divided by their mean",
        "shift-2-cap-1": "by 2, min(rho, 1)",
        "shift-1-mean-ratio": "by 1, min(rho^(1/tokens), 8)",
        "shift-0.5-plain": "by 0.5, no weights",
        "shift-2-plain": "by 2, no weights",
        **{name: NAMES[name] for name in ("tb-learned-z", "tba-prime", "ppo", "grpo", "reinforce", "raft")},
    }
    found = study("stable")
    found = {name.replace("tb-clamp-token-8", "tb-clamp-token"): runs for name, runs in found.items()}
    rows = []
    for name, said in names.items():
        runs = [found.get(f"{name}-{rate}", []) for rate in ("0.0001", "0.0003")]
        if any(runs):
            cells = [brief(r) if r else "" for r in runs]
            rows.append([said, *cells])
    return [["form", "1e-4: accuracy (worst seed; largest fall)", "3e-4"], *rows]


def stability() -> Lines:
    names = {
        "tb-robust": "Trajectory Balance, log Z low (the default then)",
        "tb-weighted": "Trajectory Balance, exact",
        "tb": "Trajectory Balance, none (the paper's form)",
        "tb-low-2": "exact, log Z lower by 2 fading standard deviations",
        "tb-low-1": "by 1",
        "tb-weighted-low": "by 2 that do not fade",
        "tb-weighted-std": "exact, groups divided by their rewards' deviation",
        "tb-weighted-floor": "exact, log Z the lowest of the group",
        **{name: NAMES[name] for name in ("tba-prime", "tb-learned-z", "ppo", "prox-rloo", "grpo", "dr-grpo")},
        **{name: NAMES[name] for name in ("online-dpo", "reinforce", "raft")},
    }
    found, rows = study("stability"), []
    for name, said in names.items():
        fresh = found.get(f"{name}-sync", [])
        cells = [brief(fresh) if fresh else ""]
        for k in (10, 64):
            stale = found.get(f"{name}-k{k}", [])
            cells.append(f"{brief(stale)}{_several(stale, fresh)}" if stale else "")
        stale = found[f"{name}-k10"]
        rows.append([said, *cells, plain(stale, "kl", 2), plain(stale, "ess", 2)])
    return [["final accuracy, %", "on-policy", "k = 10", "k = 64", "KL, nats (k = 10)", "ESS (k = 10)"], *rows]


def stability_countdown() -> Lines:
    names = {"tb-robust": "log Z low (the default then)", "tb": "none (the paper's form)"}
    names |= {name: NAMES[name] for name in ("raft", "tba-prime", "grpo", "ppo", "reinforce")}
    found, (head, *rows) = study("stability_countdown"), _by_staleness("stability_countdown", names)
    for name, row in zip(names, rows, strict=True):
        runs = found[f"{name}-k10"]
        row.append(f"{plain(runs, 'distinct_before', 1)} -> {plain(runs, 'distinct', 1)}")
    return [[*head, "different right answers of 32, k = 10"], *rows]


def countdown_against_default() -> Lines:
    best = {"tba-prime": "", "tb": ""} | dict.fromkeys(("tb-robust", "raft", "reinforce", "grpo", "ppo"), "-0.0003")
    return _against_default("stability_countdown", "0.0001", best)


def calculator_against_default() -> Lines:
    best = {"tba-prime": "", "tb": "", "ppo": ""} | dict.fromkeys(("tb-robust", "raft", "reinforce", "grpo"), "-0.0006")
    return _against_default("stability_calculator", "0.0002", best)


def _against_default(of: str, common: str, best: dict[str, str]) -> Lines:
    """Pairs of one seed: each objective less the default, at the common rate and each at its best one for k = 10."""
    names = {"tb-robust": "log Z low (the default then)", "raft": NAMES["raft"], "tba-prime": NAMES["tba-prime"]}
    names |= {"tb": "none (the paper's form)"} | {name: NAMES[name] for name in ("reinforce", "grpo", "ppo")}
    found, rows = study(of), []
    for name, said in names.items():
        own = found[f"{name}-k10{best[name]}"]
        pairs = [(found[f"{name}-{k}"], found[f"tb-robust-{k}"]) for k in ("k10", "k64")]
        pairs.append((own, found[f"tb-robust-k10{best['tb-robust']}"]))
        less = ["" if name == "tb-robust" else _paired(*pair).removeprefix(": ") for pair in pairs]
        rows.append([said, *less[:2], best[name].removeprefix("-") or common, brief(own), less[2]])
    head = [
        "points against the default, paired by seed",
        "k = 10",
        "k = 64",
        "best rate",
        "success at it, k = 10",
        "against",
    ]
    return [head, *rows]


def stability_calculator() -> Lines:
    names = {"tb-robust": "log Z low (the default then)", "tb": "none (the paper's form)"}
    names |= {name: NAMES[name] for name in ("raft", "reinforce", "grpo", "tba-prime", "ppo")}
    return _by_staleness("stability_calculator", names)


def rates() -> Lines:
    """At k = 10, seed 0: the common rate has no suffix."""
    names = {
        "tb-robust": "Trajectory Balance, log Z low (the default then)",
        "tb": "Trajectory Balance, none (the paper's form)",
    }
    names |= {name: NAMES[name] for name in ("tba-prime", "ppo", "grpo", "reinforce", "raft")}
    tasks = {"calculator": ("-6e-05", "", "-0.0006"), "countdown": ("-3e-05", "", "-0.0003")}
    rows = []
    for name, said in names.items():
        row = [said]
        for task, tried in tasks.items():
            runs = [study(f"stability_{task}").get(f"{name}-k10{rate}", []) for rate in tried]
            own = [next((run for run in found if float(run["seed"]) == 0), None) for found in runs]
            best = max((float(run[ACCURACY]) for run in own if run), default=0.0)
            for run in own:
                text = "" if run is None else f"{accuracy([run])} ({fall([run])})"
                row.append(f"**{text}**" if run is not None and float(run[ACCURACY]) == best else text)
        rows.append(row)
    head = [
        f"{task}: {rate}"
        for task, found in (("calculator", (6e-5, 2e-4, 6e-4)), ("countdown", (3e-5, 1e-4, 3e-4)))
        for rate in found
    ]
    return [["success, % (largest fall)", *head], *rows]


def guess_number() -> Lines:
    """Mean guesses with their interval, at each evaluation of a run."""
    found = study("guess_number")
    steps = [run["step"] for run in next(iter(found.values()))]
    rows = [
        [
            name,
            *(f"{run['guesses']} [{run['low']}, {run['high']}]" for run in runs),
            plain(runs[:1], "not_found", 1, 100) + " -> " + plain(runs[-1:], "not_found", 1, 100),
            f"{float(runs[-1]['seconds']) / 60:.0f}",
        ]
        for name, runs in found.items()
    ]
    head = [f"after {step} updates" if step != "0" else "before" for step in steps]
    return [["mean guesses", *head, "not found within 20, %", "minutes"], *rows]


def _by_staleness(of: str, names: dict[str, str]) -> Lines:
    found, rows = study(of), []
    for name, said in names.items():
        fresh, *stale = (found.get(f"{name}-{way}", []) for way in ("sync", "k10", "k64"))
        cells = [f"{brief(runs)}{_paired(runs, fresh)}" if runs else "" for runs in stale]
        rows.append([said, str(len(stale[0])), brief(fresh) if fresh else "", *cells])
    return [["success, %", "seeds", "on-policy", "k = 10", "k = 64"], *rows]


def _paired(runs: Runs, baseline: Runs) -> str:
    """The mean difference of runs of one seed, which have base and problems in common (Student's t)."""
    by_seed = {run["seed"]: float(run[ACCURACY]) for run in baseline}
    found = [100 * (float(run[ACCURACY]) - by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    if len(found) < 2:
        return ""
    half = quantile(0.975, len(found) - 1) * stdev(found) / len(found) ** 0.5
    return f": {mean(found):+.1f} [{mean(found) - half:+.1f}, {mean(found) + half:+.1f}]"


def _several(runs: Runs, baseline: Runs) -> str:
    """The difference to a baseline where both have several seeds."""
    return f": {against(runs, baseline)}" if min(len(runs), len(baseline)) > 1 else ""


def controller() -> Lines:
    found, rows = study("controller"), []
    names = {
        "turns-off": ("taking turns", "nothing"),
        "turns-ess": ("", "effective sample size, 0.5 to 0.9"),
        "turns-off-policy": ("", "log-ratio, 0.2 to 1"),
        "turns-lag": ("", "lag, 2 to 6"),
        "processes-off": ("in processes", "nothing"),
        "processes-ess": ("", "effective sample size"),
        "processes-off-policy": ("", "log-ratio"),
        "processes-lag": ("", "lag"),
        "processes-paced": ("", "nothing, but one use of each trajectory (pacing)"),
        "processes-paced-ess": ("", "effective sample size, and pacing"),
    }
    for name, said in names.items():
        runs, off = found[name], found[f"{name.partition('-')[0]}-off"]
        difference = against(runs, off) if runs is not off else ""
        rows.append(
            [
                *said,
                accuracy(runs),
                worst(runs),
                difference,
                fall(runs),
                plain(runs, FALL, 1, 100),
                plain(runs, "lag", 0),
                plain(runs, "ess", 2),
            ]
        )
    head = ["", "kept in range", "final accuracy, %", "worst seed", "difference to none [95 %]"]
    head += ["largest fall, points", "its mean over seeds", "mean lag", "effective sample size"]
    return [head, *rows]


def controller_by_arrival() -> Lines:
    names = {
        "processes-off": "nothing",
        "processes-ess": "effective sample size",
        "processes-off-policy": "log-ratio",
        "processes-lag": "lag",
        "processes-paced": "nothing, but pacing",
        "processes-paced-ess": "effective sample size, and pacing",
    }
    both, rows = [study("controller"), study("controller_by_arrival")], []
    for name, said in names.items():
        runs = [found[name] for found in both]
        cells = [text for r in runs for text in (brief(r), plain(r, "lag", 1), plain(r, "ess", 2), plain(r, "uses", 1))]
        rows.append([said, *cells])
    head = [f"{what}: {when}" for when in ("before", "after") for what in ("accuracy, %", "lag", "ESS", "mean uses")]
    return [["kept in range", *head], *rows]


def frontier() -> Lines:
    betas = ("0.4", "0.2", "0.1", "0.05", "0.02", "0.01")
    found, rows = study("frontier"), []
    names = {"tb-robust": "Trajectory Balance, log Z low (the default then)"} | NAMES
    for name in ("tb-robust", "tb", "tba-prime", "grpo", "dr-grpo", "ppo", "online-dpo"):
        said = names[name] + (" (its beta is in another unit)" if name == "online-dpo" else "")
        runs = [found.get(f"{name}-{beta}", []) for beta in betas]
        if any(runs):
            cells = [f"{plain(r, 'reward', 3)}, {plain(r, 'kl', 2)} ({worst(r)}; {fall(r)})" if r else "" for r in runs]
            rows.append([said, *cells])
    return [["objective", "beta 0.4: reward, KL", *betas[1:]], *rows]


def ablations() -> Lines:
    found = study("ablations")
    changed = {
        "nothing": {"": "base"},
        "answers in a group (K), batch of 140 constant": {"4": "K4", "10": "K10", "20": "base", "28": "K28"},
        "samples of a prompt (S), round of 140 constant": {"20": "base", "28": "S28", "35": "S35", "70": "S70"},
        "share of recent groups (m)": {m: f"m{m}" for m in ("0", "0.25", "0.5", "0.8")} | {"0.95": "base", "1": "m1"},
        "updates per sync (k)": {"1": "k1", "2": "base", "4": "k4", "10": "k10", "16": "k16"},
        "beta": {b: f"beta{b}" for b in ("0.4", "0.2", "0.1")}
        | {"0.05": "base"}
        | {b: f"beta{b}" for b in ("0.02", "0.01", "0.004", "0.002", "0.001")},
        "prompts in a batch (B)": {"2": "B2", "4": "B4", "7": "base", "14": "B14"},
        "the rate held constant after its warm-up, in the place of warm-up, plateau and decay": {"": "constant"},
    }
    rows = []
    for setting, of in changed.items():
        for i, (value, name) in enumerate(of.items()):
            runs = found[name]
            lag = plain(runs, "lag", 1)
            rows.append([setting if i == 0 else "", value, accuracy(runs), worst(runs), fall(runs), lag])
    return [["changed", "to", "final accuracy, %", "worst seed", "largest fall, points", "mean lag"], *rows]


def math_format() -> Lines:
    found, rows = study("math_format"), []
    for name in ("tba-prime", "dr-grpo", "grpo"):
        near, far = found[f"{name}-k2"], found[f"{name}-k10"]
        cells = [cell for runs in (near, far) for cell in (accuracy(runs), worst(runs), each(runs, FALL))]
        rows.append([NAMES[name], *cells, f"{plain(near, 'kl', 2)}, {plain(far, 'kl', 2)}"])
    told = ["worst seed", "largest fall of each seed, points"]
    head = ["objective", "2 updates off", *told, "10 updates off", *told, "KL, nats, 2 and 10 off"]
    return [head, *rows]


def selection() -> Lines:
    later = {f"arrival-{name}": runs for name, runs in study("selection_by_arrival").items()}
    found, rows = {**study("selection"), **later}, []
    names = {"uniform": "uniform", "reward": "by reward", "recency": "recent only"}
    for name, said in {**names, "arrival-recency": "recent only, by arrival"}.items():
        for count in ("1", "2", "4"):
            runs = found[f"{name}-{count}"]
            rows.append(
                [
                    said if count == "1" else "",
                    count,
                    accuracy(runs),
                    worst(runs),
                    fall(runs),
                    plain(runs, "seconds", 1),
                    thousands(runs, "tokens_generated"),
                    plain(runs, "lag", 0),
                    f"{plain(runs, 'ess', 0, 100)} %",
                ]
            )
    head = ["data", "searchers", "final accuracy, %", "worst seed", "largest fall, points", "seconds training"]
    return [[*head, "tokens generated", "mean lag", "effective sample size"], *rows]


def rare_successes() -> Lines:
    found, rows = study("rare_successes"), []
    for name, said in {"uniform": "uniform", "reward": "by reward", "recency": "recent only"}.items():
        for count in ("1", "2", "4"):
            runs = found[f"{name}-{count}"]
            fewest = "" if count == "1" else against(runs, found[f"{name}-1"])
            rows.append(
                [
                    *(said if count == "1" else "", count, each(runs, ACCURACY), accuracy(runs), fall(runs)),
                    *("" if name == "uniform" else against(runs, found[f"uniform-{count}"]), fewest),
                    *(plain(runs, "lag", 0), plain(runs, "uses", 1), f"{plain(runs, 'ess', 0, 100)} %"),
                ]
            )
    head = ["data", "searchers", "final accuracy of each seed, %", "mean", "largest fall, points"]
    compared = ["against uniform", "against one searcher"]
    return [[*head, *compared, "mean lag", "uses", "effective sample size"], *rows]


def noise() -> Lines:
    found = study("noise")
    halves = ("uniform", "reward")
    rows = [["clean", *(brief(found[f"{half}-clean"]) for half in halves)]]
    for kind, said in {"flipped": "turned over", "junk": "junk"}.items():
        for share in ("0.01", "0.05", "0.2"):
            pairs = [(found[f"{half}-{kind}-{share}"], found[f"{half}-clean"]) for half in halves]
            cells = [f"{against(runs, clean)} ({worst(runs)}; {fall(runs)})" for runs, clean in pairs]
            rows.append([f"{100 * float(share):.0f} % {said}", *cells])
    return [["", "uniform", "by reward"], *rows]


def diversity() -> Lines:
    found, rows = study("diversity"), []
    order = [("tb", "sync"), ("grpo", "sync"), ("tb", "k10"), ("tb-corrected", "k10"), ("rloo", "k10"), ("grpo", "k10")]
    names = {"tb": "Trajectory Balance", "tb-corrected": "the same, truncated ratio", "rloo": "RLOO", "grpo": "GRPO"}
    for beta in ("0.05", "0.2"):
        for name, how in order:
            runs = found[f"{name}-{beta}-{how}"]
            rows.append(
                [f"{names[name]}, {beta}", "on-policy" if how == "sync" else "stale"]
                + [spread(runs, f"pass@{k}/of64", 1, 100) for k in (1, 4, 16)]
                + [f"{100 * min(values(runs, 'pass@1/of64')):.1f}", fall(runs), spread(runs, "distinct")]
                + [spread(runs, "differ", 1, 100), plain(runs, "kl", 2)]
            )
    head = ["objective, beta", "data", "pass@1, %", "pass@4", "pass@16", "pass@1, worst seed", "largest fall, points"]
    return [[*head, "different", "two differ, %", "KL, nats"], *rows]


def sizes_by_arrival() -> Lines:
    """Asynchronous runs of the study sizes, before and after *recent* was by arrival, and with the default form."""
    before, after = study("sizes"), study("sizes_by_arrival")
    rows = []
    for size in ("0.2M", "0.45M", "1.6M"):
        runs = [before[f"tb-{size}"], after[f"tb-{size}"], after[f"tb-robust-{size}"], before[f"rloo-sync-{size}"]]
        rows.append([size.replace("M", " M"), *map(brief, runs), *(plain(r, "ess", 2) for r in runs[:3])])
    said = ("the paper's form, before", "the paper's form, after", "the default form, after", "RLOO on-policy")
    sizes = [f"effective sample size: {name}" for name in ("before", "after", "default")]
    return [["parameters", *said, *sizes], *rows]


def sizes() -> Lines:
    found, rows = study("sizes"), []
    for size in ("0.2M", "0.45M", "1.6M"):
        tb, rloo = found[f"tb-{size}"], found[f"rloo-sync-{size}"]
        cells = [cell for r in (tb, rloo) for cell in (accuracy(r), worst(r), fall(r), plain(r, "seconds", 1))]
        ratio = mean(values(rloo, "seconds")) / mean(values(tb, "seconds"))
        rows.append([size.replace("M", " M"), *cells, f"{ratio:.1f}", plain(tb, "ess", 2)])
    told = ["worst seed", "largest fall, points", "seconds"]
    head = ["parameters", "asynchronous Trajectory Balance, %", *told, "RLOO on-policy, %", *told, "times as fast"]
    return [[*head, "effective sample size, asynchronous"], *rows]


def wins(runs: Runs) -> str:
    """The mean of the wins, and those of each seed."""
    return f"{plain(runs, ACCURACY, 1, 100)} ({each(runs, ACCURACY)})"


def outcome(runs: Runs, digits: int) -> list[str]:
    """Wins, the largest fall on the way, the proxy's score, KL to so many digits, and perplexity."""
    return [
        wins(runs),
        fall(runs),
        plain(runs, "reward", 2),
        plain(runs, "kl", digits),
        plain(runs, "perplexity", 2),
    ]


def summaries() -> Lines:
    found, rows = study("summaries"), []
    names = {
        "tb": "Trajectory Balance, truncated weights",
        "rloo": "RLOO (Trajectory Balance without weights)",
        "prox-rloo": "Proximal RLOO",
        "ppo": "PPO",
        "online-dpo": "Online DPO (its beta is in another unit)",
    }
    for name, said in names.items():
        for beta in ("2", "0.5", "0.1"):
            runs = found[f"{name}-{beta}"]
            rows.append(
                [
                    said if beta == "2" else "",
                    beta,
                    *outcome(runs, 2),
                    plain(runs, "perplexity_with_prompt", 3),
                ]
            )
    head = ["", "beta", "wins, %", "largest fall, points", "the proxy's score", "KL", "perplexity"]
    return [[*head, "by tokens of prompts too"], *rows]


def summaries_pushed() -> Lines:
    near, far = study("summaries"), study("summaries_pushed")
    rows = []
    for proxy, setting, runs in (
        ("gold's marks of 870 posts", "0.1, 1e-4", near["tb-0.1"]),
        ("", "0.02, 5e-4", near["tb-pushed"]),
        ("REALSumm", "0.1, 1e-4", far["tb-0.1"]),
        ("", "0.02, 2e-4", far["tb-pushed (2e-4)"]),
        ("", "0.02, 5e-4", far["tb-pushed"]),
    ):
        seeds = ", ".join(run["seed"] for run in runs)
        rows.append(
            [
                proxy,
                setting,
                seeds,
                *outcome(runs, 1),
            ]
        )
    head = ["proxy", "beta, rate", "seeds", "wins, % (of each)", "largest fall, points", "the proxy's score", "KL"]
    return [[*head, "perplexity"], *rows]


def summaries_data() -> Lines:
    found, near = study("summaries_data"), study("summaries")
    names = {
        "tb": "Trajectory Balance, truncated weights",
        "rloo": "RLOO (Trajectory Balance without weights)",
        "prox-rloo": "Proximal RLOO",
        "ppo": "PPO",
        "online-dpo": "Online DPO",
    }
    rows = []
    for name, said in names.items():
        middle = [run for run in near[f"{name}-0.5"] if run["seed"] == "1"]
        runs = (found[f"{name}-sync"], middle, found[f"{name}-k16"])
        rows.append([said, *(f"{plain(r, ACCURACY, 1, 100)}, {plain(r, 'kl', 2)} ({fall(r)})" for r in runs)])
    return [["", "on-policy", "2 updates off", "16 updates off"], *rows]


def summaries_m() -> Lines:
    found, rows = study("summaries_m"), []
    names = {
        "m-0.4": "m = 0.4, softmax of reward in the other groups",
        "m-0.5": "m = 0.5",
        "m-0.6": "m = 0.6",
        "uniform-1": "uniform, one searcher",
        "uniform-2": "uniform, two",
        "reward-1": "softmax of reward, one",
        "reward-2": "softmax of reward, two",
        "recency-1": "recent only, one",
        "recency-2": "recent only, two",
    }
    for name, said in names.items():
        runs = found[name]
        rows.append(
            [
                said,
                *outcome(runs, 1),
                plain(runs, "lag", 0),
            ]
        )
    head = ["", "wins, % (of each seed)", "largest fall, points", "the proxy's score", "KL", "perplexity", "lag"]
    return [head, *rows]


def red_team() -> Lines:
    found, rows = study("red_team"), []
    names = {
        "tb-async": "asynchronous Trajectory Balance",
        "ancestor-sync": "its ancestor",
        "tb-sync": "Trajectory Balance, on-policy",
        "ppo-sync": "PPO (KL 0.1)",
        "reinforce-sync": "REINFORCE (leave-one-out baseline, no KL)",
    }
    for name, said in names.items():
        runs = found[name]
        rows.append([said, accuracy(runs), worst(runs), fall(runs), each(runs, "seconds_to_target", 1)])
        rows[-1] += [plain(runs, "seconds_in_all", 0), plain(runs, "lag", 0), plain(runs, "ess", 2)]
    head = ["", "succeed, % of 256", "worst seed", "largest fall, points", "seconds to 60 %, each seed"]
    return [[*head, "seconds in all", "mean lag", "effective sample size"], *rows]


def red_team_by_arrival() -> Lines:
    return _red_team({"tb-async": "asynchronous Trajectory Balance"}, "red_team_by_arrival")


def red_team_slow_victim() -> Lines:
    return _red_team({"async-1": "asynchronous, 1 searcher", "async-4": "4 searchers"}, "red_team_slow_victim")


def _red_team(names: dict[str, str], of: str) -> Lines:
    found, rows = study(of), []
    for name, said in (names | {"ancestor-sync": "its ancestor", "ppo-sync": "PPO (KL 0.1)"}).items():
        runs = found[name]
        rows.append([said, each(runs, ACCURACY), each(runs, "seconds_in_all", 1, 0), plain(runs, "uses", 1)])
        rows[-1] += [plain(runs, "lag", 0), plain(runs, "ess", 2), f"{plain(runs, 'trainer_paced', 0, 100)} %"]
    head = ["", "succeed, % of 256, each seed", "seconds in all", "mean uses", "mean lag", "effective sample size"]
    return [[*head, "trainer paced"], *rows]


def red_team_selection() -> Lines:
    found, rows = study("red_team_selection"), []
    for name, said in {"uniform": "uniform", "reward": "by reward", "recency": "recent only"}.items():
        for count in ("1", "2", "4"):
            runs = found[f"{name}-{count}"]
            fewest = "" if count == "1" else against(runs, found[f"{name}-1"], "success")
            rows.append(
                [
                    *(said if count == "1" else "", count, each(runs, "success"), spread(runs, "success", 1, 100)),
                    *("" if name == "uniform" else against(runs, found[f"uniform-{count}"], "success"), fewest),
                    *(each(runs, "families", 1.0, 0), each(runs, "distance", 1.0, 2)),
                    *(plain(runs, "lag", 0), plain(runs, "uses", 1), f"{plain(runs, 'ess', 0, 100)} %"),
                ]
            )
    head = ["data", "searchers", "succeed, % of 1,024, each seed", "mean", "against uniform", "against one searcher"]
    of = ["weak spots found, of 20", "distance", "mean lag", "uses", "effective sample size"]
    return [[*head, *of], *rows]


def red_team_tuning() -> Lines:
    found, rows = study("red_team_tuning"), []
    names = {
        "async": "asynchronous Trajectory Balance",
        "ancestor": "ancestor",
        "tb": "Trajectory Balance, on-policy",
        "ppo": "PPO",
        "reinforce": "REINFORCE",
    }
    for name, said in names.items():
        runs = [found[f"{name}-{rate}"] for rate in ("0.0003", "0.001", "0.003")]
        rows.append([said, *(f"{accuracy(r)} ({fall(r)})" for r in runs)])
    later = study("red_team_tuning_by_arrival")
    runs = [later[f"async-{rate}"] for rate in ("0.0003", "0.001", "0.003")]
    rows.insert(1, ["the same since recent is by arrival", *(f"{accuracy(r)} ({fall(r)})" for r in runs)])
    return [["succeed, % of 256 (largest fall)", "3e-4", "1e-3", "3e-3"], *rows]


TABLES: dict[str, Callable[[], Lines]] = {
    "staleness": staleness,
    "staleness-by-k": staleness_by_k,
    "correction": correction,
    "wall-clock": wall_clock,
    "recent": recent,
    "wall-clock-by-arrival": wall_clock_by_arrival,
    "wall-clock-ratio": wall_clock_ratio,
    "form-noise": form_noise,
    "asymmetric": asymmetric,
    "wall-clock-objectives": wall_clock_objectives,
    "tuning": tuning,
    "stable": stable,
    "stability": stability,
    "stability-countdown": stability_countdown,
    "countdown-against-default": countdown_against_default,
    "stability-calculator": stability_calculator,
    "calculator-against-default": calculator_against_default,
    "rates": rates,
    "guess-number": guess_number,
    "controller": controller,
    "controller-by-arrival": controller_by_arrival,
    "frontier": frontier,
    "ablations": ablations,
    "math-format": math_format,
    "selection": selection,
    "rare-successes": rare_successes,
    "noise": noise,
    "diversity": diversity,
    "sizes": sizes,
    "sizes-by-arrival": sizes_by_arrival,
    "summaries": summaries,
    "summaries-pushed": summaries_pushed,
    "summaries-data": summaries_data,
    "summaries-m": summaries_m,
    "red-team": red_team,
    "red-team-by-arrival": red_team_by_arrival,
    "red-team-slow-victim": red_team_slow_victim,
    "red-team-selection": red_team_selection,
    "red-team-tuning": red_team_tuning,
}


def table(name: str) -> str:
    """One table in Markdown."""
    head, *rows = TABLES[name]()
    return "\n".join(f"| {' | '.join(cells)} |".replace("  |", " |") for cells in [head, ["---"] * len(head), *rows])


def differing(text: str) -> list[str]:
    """The tables that the page lacks, has twice, or has with other figures than the csv files."""
    there = [(found[1], found[3]) for found in BLOCK.finditer(text)]
    known = [name for name in TABLES if there.count((name, table(name))) != 1]
    return known + [name for name, _ in there if name not in TABLES]


def printed(text: str) -> str:
    """The page with its tables from the csv files."""
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{table(found[1])}", text)


def main(arguments: Iterable[str]) -> int:
    """The command. Writes the page, or names what differs."""
    parser = argparse.ArgumentParser(description="prints the tables of docs/results.md from docs/results/*.csv")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a table differs")
    check = parser.parse_args(list(arguments)).check
    text = PAGE.read_text(encoding="utf-8")
    if check:
        wrong = differing(text)
        if wrong:
            print(f"not as in the csv files: {', '.join(wrong)}; run `python tools/results_page.py`")
        return 1 if wrong else 0
    PAGE.write_text(printed(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
