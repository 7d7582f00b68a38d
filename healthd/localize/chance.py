"""What chance gives: how often healthy members fail, as learnt, and what a path or a flaky end is likelier than."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from healthd.localize.evidence import Evidence, Pair, disjoint

# How much likelier than "one end is flaky" a path must be, whatever share of its tests a flaky member fails.
PATH_ODDS = 300.0
PATH_FAILS = 4  # tests of the pair itself: one that fails a fifth of its tests by chance fails four in a row in 0.8 %
BUDGET = 0.001  # false accusations accepted for each validation of a whole healthy fleet
FLAKY = 0.5  # how often a flaky member makes its group fail, which decides how long one is looked for
OPEN_ODDS = 0.05  # a member is worth more tests while its odds of being flaky, one culprit being expected, are above
# What is taken for known before any test, at least: that many failures by chance in that many tests of healthy members.
CHANCE_FAILS, CHANCE_TESTS = 0.03, 10.0
MOST_CHANCE = 0.25  # failures by chance are never taken to be more frequent than this


def chance_of(ev: Evidence, odd: Iterable[Pair], without: Iterable[int] = ()) -> float:
    """
    The share of tests that healthy members fail, as learnt: from pairs that failed though both ends pass elsewhere.

    Pairs with a member in common count once, since that member may be the cause; `without`: pairs of these do not
    count, since whether they fail by chance is the question. What earlier searches have seen only raises the estimate:
    a network that was good for weeks may be bad today. So does the setting, less and less as tests pass.
    """
    count = len(disjoint(pair for pair in odd if not ev.is_soft(pair) and set(pair).isdisjoint(without))) // 2
    tests = ev.passed + count
    known = max(CHANCE_FAILS, ev.problem.false_alarm_ratio * CHANCE_TESTS)

    def estimate(failed: float, tests: float) -> float:
        """From above."""
        return (known + failed + 2 * math.sqrt(failed)) / (CHANCE_TESTS + tests)

    ever = estimate(count + ev.problem.seen_failed, tests + ev.problem.seen_tests)
    return min(MOST_CHANCE, max(estimate(count, tests), ever))


def is_chance(ev: Evidence, many: float, tests: int, failed: int, chance: float) -> bool:
    """
    Whether chance alone gives one of `many` healthy ones so many failures in so many tests too often.

    The bound holds at any time that one looks: the failures can be chosen in `comb` ways among the tests.
    """
    return many * math.comb(max(tests, failed), failed) * chance**failed > BUDGET


def independent(v: int, partners: Iterable[int]) -> int:
    """
    How many failures of a member in tests with these partners (itself: alone) one bad path does not explain.

    Of those with the partner with whom it failed most one counts, since the path to it may be bad.
    """
    counts = Counter(partners)
    own = counts.pop(v, 0)
    return own + counts.total() - max(counts.values()) + 1 if counts else own


def is_path(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """A pair that fails each time, by itself, while both ends pass with others: too often for a flaky end or chance."""
    failed, passed = ev.own(pair)
    if passed or failed < PATH_FAILS or ev.is_soft(pair):
        return False
    if is_chance(ev, ev.count, failed, failed, chance_of(ev, odd, pair)):
        return False
    others = ev.passes_apart(*pair)
    share = (failed - 1) / (failed - 1 + others)  # of failures of a flaky end for which this is likeliest
    return others > 0 and share ** (failed - 1) * (1 - share) ** others * PATH_ODDS <= 1


def is_open(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """Whether an end of an odd pair may yet turn out flaky: likelier than chance by enough."""
    for v in pair:
        chance = chance_of(ev, odd, (v,))
        failed = independent(v, (o for o, _ in ev.counted(v)))
        odds = failed * math.log(FLAKY / chance) + ev.passes[v] * math.log((1 - FLAKY) / (1 - chance))
        if odds - math.log(len(ev.job)) > math.log(OPEN_ODDS):
            return True
    return False
