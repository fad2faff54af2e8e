"""Runs the strategy contract over every registered strategy."""

from __future__ import annotations

from qdqspec._core.registry import names, resolve
from qdqspec.testing.strategies import StrategyContract


class TestAttribution(StrategyContract):
    strategy = resolve("strategy", "attribution")


class TestRegion(StrategyContract):
    strategy = resolve("strategy", "region")


class TestExhaustive(StrategyContract):
    strategy = resolve("strategy", "exhaustive")


class TestOptuna(StrategyContract):
    strategy = resolve("strategy", "optuna")


class TestSubgraph(StrategyContract):
    strategy = resolve("strategy", "subgraph")


def test_every_strategy_has_a_contract() -> None:
    covered = {cls.strategy for cls in StrategyContract.__subclasses__()}
    assert covered == {resolve("strategy", name) for name in names("strategy")}
