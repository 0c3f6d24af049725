"""The killable processes: deadlines, crashes, memory, and the registry of checkers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from verifier import registry
from verifier.outcome import Verdict
from verifier.pool import CheckerPool
from verifier.registry import UnknownChecker

ROOT = Path(__file__).resolve().parents[2]

PLUGIN = """
import os, signal, time

def half(response, gold, **options): return 0.5
def full(response, gold, **options): return 1.0
def fails(response, gold, **options): raise RuntimeError("no luck")
def sleeps(response, gold, **options): time.sleep(60)
def computes(response, gold, **options): return bool(9 ** (9 ** 9) > len(gold))
def ignores(response, gold, **options):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
def dies(response, gold, **options): os.kill(os.getpid(), signal.SIGKILL)
def exits(response, gold, **options): os._exit(3)
def eats(response, gold, **options): return len(bytearray(8 << 30)) > 0
def pid(response, gold, **options): return float(os.getpid())
def who(response, gold, **options):
    from verifier.outcome import Verdict
    return Verdict("correct", str(os.getpid()), "", str(sorted(options.items())))
def nothing(response, gold, **options): return None
who_fast = lambda response, gold, **options: who(response, gold, **options)
who_fast.fast = True
"""
NAMES = (
    *("half", "full", "fails", "sleeps", "computes", "ignores", "dies", "exits", "eats", "who"),
    *("nothing", "who_fast"),
)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package with checkers; spawned workers inherit the search path."""
    (tmp_path / "dapo_test_checkers.py").write_text(PLUGIN)
    info = tmp_path / "dapo_test_checkers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dapo-test-checkers\nVersion: 1.0\n"
    )
    lines = [f"{name} = dapo_test_checkers:{name}" for name in NAMES]
    lines.append("broken = dapo_test_checkers:absent")
    (info / "entry_points.txt").write_text("\n".join(["[dapo.checkers]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.get.cache_clear()
    yield
    registry.get.cache_clear()


def small_pool(workers: int = 1, deadline_s: float = 1.0, memory_mib: int = 2048) -> CheckerPool:
    return CheckerPool(workers, deadline_s, memory_mib, warm=())


async def test_what_a_checker_returns_becomes_an_outcome_and_partial_credit_is_wrong(plugin):
    async with small_pool() as pool:
        assert (await pool.check("full", "r", "g")).outcome == "correct"
        assert (await pool.check("half", "r", "g")).outcome == "wrong"
        assert (await pool.check("who", "r", "g", {"boxed": True})).reason == "[('boxed', True)]"


async def test_a_failing_checker_is_an_error_and_never_wrong(plugin):
    async with small_pool() as pool:
        assert await pool.check("fails", "r", "g") == Verdict(
            "error", reason="RuntimeError: no luck"
        )
        assert (await pool.check("nothing", "r", "g")).outcome == "error"


@pytest.mark.parametrize("name", ["sleeps", "computes", "ignores"])
async def test_a_check_past_its_deadline_is_killed_and_the_worker_replaced(plugin, name):
    async with small_pool() as pool:
        first = (await pool.check("who", "r", "g")).extracted
        assert first is not None
        assert await pool.check(name, "r", "g") == Verdict("error", reason="timeout")
        second = (await pool.check("who", "r", "g")).extracted
        assert second != first
        assert not Path(f"/proc/{first}").exists()


@pytest.mark.parametrize("name", ["dies", "exits"])
async def test_a_checker_that_ends_its_process_is_an_error_and_the_pool_goes_on(plugin, name):
    async with small_pool() as pool:
        verdict = await pool.check(name, "r", "g")
        assert verdict.outcome == "error"
        assert verdict.reason.startswith("died")
        assert (await pool.check("full", "r", "g")).outcome == "correct"


async def test_memory_is_limited(plugin):
    async with small_pool(memory_mib=1024, deadline_s=5) as pool:
        verdict = await pool.check("eats", "r", "g")
        assert (verdict.outcome, verdict.reason) == ("error", "MemoryError: ")


async def test_a_worker_that_dies_between_checks_is_replaced(plugin):
    async with small_pool() as pool:
        worker = (await pool.check("who", "r", "g")).extracted
        os.kill(int(worker or 0), 9)
        await asyncio.sleep(0.5)
        verdict = await pool.check("who", "r", "g")
        assert verdict.outcome == "correct"
        assert verdict.extracted != worker


async def test_one_slow_check_does_not_hold_up_the_others(plugin):
    async with small_pool(workers=2, deadline_s=3) as pool:
        await asyncio.gather(*(pool.check("who", "r", "g") for _ in range(4)))
        slow = asyncio.create_task(pool.check("sleeps", "r", "g"))
        start = time.monotonic()
        await asyncio.gather(*(pool.check("full", "r", "g") for _ in range(20)))
        assert time.monotonic() - start < 2
        assert (await slow).reason == "timeout"


async def test_a_cancelled_check_frees_its_worker(plugin):
    async with small_pool(deadline_s=30) as pool:
        await pool.check("who", "r", "g")
        slow = asyncio.create_task(pool.check("sleeps", "r", "g"))
        await asyncio.sleep(0.3)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        async with asyncio.timeout(10):
            assert (await pool.check("full", "r", "g")).outcome == "correct"


async def test_fast_checkers_run_in_the_callers_process(plugin):
    async with small_pool() as pool:
        assert (await pool.check("math", "Answer: 34", "34")).outcome == "correct"
        assert (await pool.check("math_dapo_compat", "Answer: 34", "34")).outcome == "correct"
        assert (await pool.check("who_fast", "r", "g")).extracted == str(os.getpid())
        assert pool._pool is None


async def test_a_closed_pool_gives_errors_and_leaves_no_process(plugin):
    pool = small_pool()
    worker = (await pool.check("who", "r", "g")).extracted
    await pool.close()
    assert not Path(f"/proc/{worker}").exists()
    assert (await pool.check("who", "r", "g")).outcome == "error"


def test_workers_die_with_their_parent(plugin):
    script = textwrap.dedent("""
        import asyncio, os, sys
        from verifier.pool import CheckerPool

        async def main():
            pool = CheckerPool(workers=1, deadline_s=60, warm=())
            print((await pool.check("who", "r", "g")).extracted, flush=True)
            await pool.check("sleeps", "r", "g")

        if __name__ == "__main__":
            asyncio.run(main())
    """)
    path = Path(sys.path[0]) / "parent.py"
    path.write_text(script)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), sys.path[0]])}
    process = subprocess.Popen([sys.executable, path], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = process.stdout.readline().strip()
    assert Path(f"/proc/{worker}").exists()
    time.sleep(0.3)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":  # killed; waiting to be collected by init
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{worker}").exists()


async def test_math_verify_judges_symbolic_answers_and_cannot_hang():
    async with CheckerPool(workers=1, deadline_s=5) as pool:
        for response, gold, expected in (
            (r"so \boxed{4a - 2}", "4a-2", "correct"),
            (r"so \boxed{-2 + 4a}", "4a-2", "correct"),
            (r"so \boxed{7\pi}", r"7\pi", "correct"),
            (r"so \boxed{A}", "A", "correct"),
            (r"so \boxed{B}", "A", "wrong"),
            (r"Answer: $\frac{\sqrt{8}}{2}$", r"\sqrt{2}", "correct"),
            ("Answer: 34。", "34", "correct"),
            ("so it is 7", r"7\pi", "no_answer"),
        ):
            assert (await pool.check("math_verify", response, gold)).outcome == expected, response
        verdict = await pool.check("math_verify", "Answer: $10^{10^{10^{10}}}$", r"7\pi")
        assert verdict.outcome in ("wrong", "error")


def test_an_unknown_checker_is_refused_with_the_known_names(plugin):
    with pytest.raises(UnknownChecker, match=r"math, math_dapo_compat, math_verify, .*half"):
        registry.get("maths")
    with pytest.raises(UnknownChecker, match="cannot be loaded"):
        registry.get("broken")


def test_reasoning_gym_is_resolved_only_where_it_is_installed(monkeypatch):
    real = registry.importlib.util.find_spec
    monkeypatch.setattr(
        registry.importlib.util,
        "find_spec",
        lambda name: None if name == "reasoning_gym" else real(name),
    )
    with pytest.raises(UnknownChecker, match="not installed"):
        registry.get("reasoning_gym:leg_counting")


def test_a_reasoning_gym_scorer_is_binarised_and_its_exceptions_are_errors(monkeypatch):
    module = types.ModuleType("reasoning_gym")
    scores = {"34": 1.0, "35": 0.01}

    def scorer(answer, entry):
        assert entry["answer"] == "34"
        return scores[answer]

    def get_score_answer_fn(dataset):
        if dataset != "sums":
            raise ValueError(f"{dataset} is not registered")
        return scorer

    module.get_score_answer_fn = get_score_answer_fn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    registry.get.cache_clear()
    name = "reasoning_gym:sums"
    assert registry.get(name).pooled
    assert registry.run(name, "Answer: 34", "34", {"boxed": True}).outcome == "correct"
    assert registry.run(name, "Answer: 35", "34", {"entry": {"metadata": {}}}).outcome == "wrong"
    assert registry.run(name, "Answer: 36", "34", {}).reason == "KeyError: '36'"
    assert registry.run(name, "so 34", "34", {}).outcome == "no_answer"
    with pytest.raises(UnknownChecker, match="no dataset 'sum'"):
        registry.get("reasoning_gym:sum")
    registry.get.cache_clear()
