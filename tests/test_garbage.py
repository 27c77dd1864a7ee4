"""The garbage collector runs rarely while libraries are imported, and then less often than Python has it."""

import subprocess
import sys


def told(code):
    done = subprocess.run(
        [sys.executable, "-c", "import gc\nfrom grpo_core.processes.memory import *\n" + code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_an_import_looks_at_its_objects_a_few_times():
    code = """if True:
        runs = []
        gc.callbacks.append(lambda phase, info: runs.append(phase))
        def made():
            runs.clear()
            return [[i] for i in range(200_000)] and len(runs) // 2
        usual = made()
        collect_rarely()
        rarely = made()
        spare_the_collector()
        print(usual > 100, rarely < 10, made() < 10)
    """
    assert told(code) == ["True", "True", "True"]


def test_it_runs_less_often_than_pythons_and_skips_living_objects():
    code = """if True:
        gc.set_threshold(700, 8, 7)
        collect_rarely()
        collect_rarely()
        kept = [[]]
        spare_the_collector()
        print(*gc.get_threshold(), gc.is_tracked(kept), any(each is kept for each in gc.get_objects()))
    """
    assert told(code) == ["50000", "8", "7", "True", "False"]
