"""The rows of the faults of real fleets; all with the default settings unless said."""

from __future__ import annotations

from collections.abc import Iterator

from healthd.aggregator.validation.plan import NOISE_RATIO
from healthd.localize.model import Outcome
from tests.benchmarks.localize import hard
from tests.benchmarks.localize.hard import noisy, parts, trunk, within
from tests.benchmarks.localize.table import Row, bad, exactly, flaky, nothing_named, path

DEFAULT = NOISE_RATIO
TOLD = ("right", "missing", "wrong", "half")


def hard_rows() -> Iterator[Row]:
    """All of them."""
    yield from _cut_rows()
    yield from _noise_and_path_rows()
    yield from _rare_rows()


def _cut_rows() -> Iterator[Row]:
    for told in TOLD:
        yield Row(
            kind=f"a quarter cut off, labels {told}",
            members=64,
            runs=2000,
            make=parts(16),
            right=hard.cut_named,
            culprits="16 cut off",
            switch=16,
            told=told,
            exact=0.95,
        )
    for told in TOLD:
        yield Row(
            kind=f"two switches cut off, labels {told}",
            members=16,
            runs=2000,
            make=parts(4, apart=2),
            right=hard.cut_named,
            culprits="2 of 4",
            switch=4,
            told=told,
            exact=0.95,
            false=0 if told == "right" else 0.01,
        )
        yield Row(
            kind=f"a switch cut off and a bad node, labels {told}",
            members=64,
            runs=2000,
            make=parts(8, others=1),
            right=hard.cut_named,
            culprits="1 of 8, 1",
            switch=8,
            told=told,
            exact=0.95,
        )
    yield Row(
        kind="two small switches cut off, labels missing",
        members=64,
        runs=2000,
        make=parts(4, apart=2),
        right=hard.cut_named,
        culprits="2 of 16",
        switch=4,
        told="missing",
        exact=0.9,
        false=0.05,
    )
    yield Row(
        kind="ranks of a node, a quarter cut off",
        members=16,
        runs=2000,
        make=parts(4),
        right=hard.cut_named,
        culprits="4 cut off",
        exact=0.95,
    )


def _noise_and_path_rows() -> Iterator[Row]:
    fail = Outcome.FAIL
    for members, count, share in ((8, 4, 0.005), (16, 8, 0.02), (64, 32, 0.02), (64, 32, 0.05), (64, 16, 0.02)):
        yield Row(
            kind=f"always, noise {share:g} set, none there",
            members=members,
            runs=500,
            make=bad(count),
            right=within(exactly, 8 if 2 * count == members else 6),
            culprits=str(count),
            noise=share,
            exact=0.98,
        )
        yield Row(
            kind=f"always, noise {share:g} set and there",
            members=members,
            runs=500,
            make=noisy(bad(count), share),
            right=exactly,
            culprits=str(count),
            noise=share,
            exact=0,
            false=0.002,
        )
    for members, share in ((16, 0.02), (64, 0.02), (64, 0.05)):
        yield Row(
            kind=f"path, noise {share:g} set",
            members=members,
            runs=500,
            make=path,
            right=hard.path_exactly,
            culprits="1 path",
            noise=share,
            exact=0.95,
        )
    for members in (8, 16, 64):
        yield Row(
            kind="heals after one more failure",
            members=members,
            runs=2000,
            make=hard.healing,
            right=hard.no_sound_path,
            culprits="1",
            exact=0.98,
        )
        yield Row(
            kind="flaky, p = 0.2",
            members=members,
            runs=2000,
            make=hard.seldom,
            right=hard.no_sound_path,
            culprits="1",
            first=fail,
            exact=0.98,
        )
    for members, runs in ((64, 2000), (512, 2000)):
        yield Row(
            kind="always, noise 0.005, default setting",
            members=members,
            runs=runs,
            make=noisy(bad(1), 0.005),
            right=exactly,
            culprits="1",
            noise=DEFAULT,
            exact=0.98,
            false=0.002,
        )
    yield Row(
        kind="2 % of all pairs",
        members=64,
        runs=500,
        make=hard.bucket,
        right=hard.some_go_on,
        culprits="40 paths",
        exact=0.9,
        false=0.03,
    )
    for members, size in ((64, 8), (16, 4)):
        for told in TOLD:
            yield Row(
                kind=f"trunk, labels {told}",
                members=members,
                runs=1000,
                make=trunk(size),
                right=hard.trunk_named if told == "right" else hard.no_trunk_named,
                culprits=f"2 of {members // size}",
                switch=size,
                told=told,
                exact=0.95 if told == "right" else 0,
                false=0.01,
            )
    for members in (8, 16, 64):
        yield Row(
            kind="a path beside a bad node",
            members=members,
            runs=1000,
            make=hard.path_beside_bad,
            right=hard.both_named,
            culprits="1, 1 path",
            exact=0.95,
        )
    for members in (8, 16, 64):
        yield Row(
            kind="two paths of one healthy node",
            members=members,
            runs=1000,
            make=hard.two_paths,
            right=hard.paths_right,
            culprits="2 paths",
            exact=0,
            false=0.05,
        )


def _rare_rows() -> Iterator[Row]:
    fail = Outcome.FAIL
    yield Row(
        kind="slow, racks behind 2:1 uplinks",
        members=64,
        runs=1000,
        make=hard.slow_in_racks,
        right=within(exactly, 8),
        culprits="1",
        switch=8,
        first=Outcome.SLOW,
        exact=0.98,
    )
    yield Row(
        kind="three certain nodes together",
        members=64,
        runs=500,
        make=hard.three_together,
        right=hard.three_named,
        culprits="3",
        exact=0.98,
    )
    yield Row(
        kind="two kinds, labelled",
        members=16,
        runs=2000,
        make=parts(8),
        right=hard.one_kind_goes_on,
        culprits="8 and 8",
        switch=8,
        exact=0.98,
    )
    yield Row(
        kind="two kinds, no labels",
        members=16,
        runs=2000,
        make=parts(8),
        right=hard.one_kind_goes_on,
        culprits="8 and 8",
        exact=0.9,
    )
    for members, count in ((64, 1), (64, 4), (4, 2), (16, 8)):
        yield Row(
            kind="always, shown by the whole",
            members=members,
            runs=1000,
            make=hard.shown(count),
            right=exactly,
            culprits=str(count),
            rounds=2 if count == 1 else 10,
        )
    for members in (8, 64):
        yield Row(
            kind="all bad",
            members=members,
            runs=500,
            make=bad(members),
            right=hard.nobody_decided,
            culprits="all",
            rounds=8,
        )
    for members, count in ((64, 48), (512, 384)):
        yield Row(
            kind="always, three quarters, 9 rounds",
            members=members,
            runs=300 if members == 64 else 20,
            make=bad(count),
            right=hard.some_told,
            culprits=str(count),
            exact=0.95,
            limit=9,
        )
    yield Row(
        kind="path, 9 rounds",
        members=512,
        runs=50,
        make=path,
        right=hard.some_told,
        culprits="1 path",
        exact=0.95,
        limit=9,
    )
    for members, runs in ((512, 500), (64, 2000), (16, 2000)):
        yield Row(
            kind="healthy, noise 2 %, default setting",
            members=members,
            runs=runs,
            make=noisy(bad(0), 0.02),
            right=nothing_named,
            culprits="0",
            noise=DEFAULT,
            first=fail,
            exact=0.95,
            false=0.001 if members == 512 else 0.005,
        )
    yield Row(
        kind="flaky, p = 0.5, noise 2 %, default setting",
        members=64,
        runs=500,
        make=noisy(flaky, 0.02),
        right=exactly,
        culprits="1",
        noise=DEFAULT,
        first=fail,
        exact=0,
        false=0.005,
    )
    for members in (4, 8, 16, 64):
        yield Row(
            kind="flaky, p = 0.5, default setting",
            members=members,
            runs=1000,
            make=flaky,
            right=exactly,
            culprits="1",
            noise=DEFAULT,
            first=fail,
            exact=0.95,
            false=0.001,
        )
    for members, runs in ((8, 2000), (16, 2000), (64, 500), (512, 20)):
        for share in (0.005, 0.02, 0.05):
            for count in (0, 1):
                yield Row(
                    kind=f"starts, noise {share:g}, default setting",
                    members=members,
                    runs=runs,
                    make=noisy(bad(count), share),
                    right=hard.starts(members),
                    culprits=str(count),
                    noise=DEFAULT,
                    first=fail,
                    exact=0.95,
                    false=0.005,
                )
