"""What processes tell each other over one store: in threads, three and more of them."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import distributed

from runtime.errors import BrokenCollectiveError, ConfigError, WorkerError
from runtime.ranks import processes as processes_module
from runtime.ranks.processes import VARIABLES, Processes, join_processes, single_process


def job(size):
    store = distributed.HashStore()
    return [Processes(rank, size, rank, size, store) for rank in range(size)]


def in_threads(work, processes):
    """Results by rank of what all processes do at once."""
    results = {}

    def run(process):
        results[process.rank] = work(process)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[process.rank] for process in processes]


def test_values_are_gathered_by_rank():
    processes = job(4)
    found = in_threads(lambda p: p.gather("x", f"of {p.rank}"), processes)
    assert found == [["of 0", "of 1", "of 2", "of 3"]] * 4
    assert [p.leads for p in processes] == [True, False, False, False]


def test_what_is_published_is_seen_by_rank_and_by_name():
    processes = job(3)
    processes[2].publish("x", "2")
    assert processes[0].published("x") == [None, None, "2"]
    processes[0].publish("x", "")
    assert processes[1].published("x") == ["", None, "2"]
    assert processes[1].published("y") == [None] * 3
    processes[2].publish("x", "3")
    assert processes[0].published("x") == ["", None, "3"]


def test_the_first_to_set_a_key_sets_it():
    first, second, third = job(3)
    assert third.peek("x") is None
    assert second.put_first("x", "a") == "a"
    assert first.put_first("x", "b") == third.put_first("x", "c") == "a"
    assert third.peek("x") == "a"


def test_what_the_leader_says_comes_to_all():
    said = {0: "yes", 1: "no", 2: None}
    assert in_threads(lambda p: p.from_leader("x", said[p.rank]), job(3)) == ["yes"] * 3


def test_the_leader_leaves_when_all_others_have(monkeypatch):
    processes = job(3)
    for process in processes[1:]:
        process.publish("ended", "")
    leaving = threading.Thread(target=processes[0].end, daemon=True)
    leaving.start()
    processes[1].end()
    leaving.join(0.3)
    assert leaving.is_alive(), "one has not left"
    processes[2].end()
    leaving.join(10)
    assert not leaving.is_alive()


def test_others_leave_without_waiting_and_none_before_all_are_through():
    processes = job(3)
    threads = [threading.Thread(target=p.end, daemon=True) for p in processes[1:]]
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    assert all(thread.is_alive() for thread in threads)
    processes[0].publish("ended", "")
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert processes[0].published("left") == [None, "", ""]


def test_a_leader_waits_for_one_that_does_not_leave_so_long_and_no_longer(monkeypatch):
    monkeypatch.setattr(processes_module, "LEAVE_S", 0.2)
    first, second = job(2)
    second.publish("ended", "")
    first.end()
    assert first.published("left") == ["", None]


def test_an_end_stops_the_pulse():
    ended = []
    (alone,) = job(1)
    replace(alone, pulse=SimpleNamespace(lost=None, end=lambda: ended.append(1))).end()
    assert ended == [1]


@pytest.mark.parametrize("rank", range(3))
def test_a_failure_is_told_to_the_others_with_its_rank_and_its_first_line(rank):
    processes = job(3)
    failing = processes[rank]
    assert failing.fail(OSError("disk: is gone\nmore")) is None
    assert failing.failure() is None
    for other in (p for p in processes if p is not failing):
        assert str(other.failure()) == f"process {rank} failed: disk: is gone"
        with pytest.raises(WorkerError, match=f"^process {rank} failed: disk: is gone$"):
            other.gather("x", "1")
    # Its own further faults change nothing.
    failing.fail(OSError("again"))
    assert processes[rank - 1].peek("failed") == f"{rank}:disk: is gone"


def test_of_a_broken_collective_the_cause_is_told(monkeypatch):
    """Whoever broke it says so a moment later."""
    monkeypatch.setattr(processes_module, "CAUSE_S", 20.0)
    processes = job(3)
    late = threading.Timer(0.3, lambda: processes[2].fail(OSError("disk is gone")))
    late.start()
    cause = processes[0].fail(BrokenCollectiveError("broken off"))
    assert str(cause) == "process 2 failed: disk is gone"
    late.join()


def test_of_a_broken_collective_without_a_cause_it_is_told_itself(monkeypatch):
    monkeypatch.setattr(processes_module, "CAUSE_S", 0.1)
    processes = job(3)
    assert processes[0].fail(BrokenCollectiveError("broken off")) is None
    assert str(processes[1].failure()) == "process 0 failed: broken off"
    lost = WorkerError("process 2 (pid 7) was killed")
    watching = replace(job(3)[1], pulse=SimpleNamespace(lost=lost))
    assert watching.fail(BrokenCollectiveError("broken off")) is lost
    assert watching.peek("failed") == "1:process 2 (pid 7) was killed"


def test_a_process_alone_waits_for_no_cause(monkeypatch):
    monkeypatch.setattr(processes_module, "CAUSE_S", 1e6)
    assert single_process().fail(BrokenCollectiveError("broken off")) is None


def test_what_ends_a_block_is_told_and_raised():
    first, second, third = job(3)
    with pytest.raises(KeyboardInterrupt), second.reporting_failures():
        raise KeyboardInterrupt
    assert str(first.failure()) == "process 1 failed: KeyboardInterrupt"
    # What came of another's failure names that one, and any other fault itself.
    with (
        pytest.raises(WorkerError, match=r"^process 1 failed: KeyboardInterrupt$") as caught,
        third.reporting_failures(),
    ):
        raise WorkerError("the feeder died")
    assert str(caught.value.__cause__) == "the feeder died"
    with pytest.raises(ZeroDivisionError), third.reporting_failures():
        raise ZeroDivisionError
    with third.reporting_failures():
        pass
    assert str(first.failure()) == "process 1 failed: KeyboardInterrupt"


def test_a_fault_is_raised_though_the_store_is_gone():
    class Gone:
        def compare_set(self, *_arguments):
            raise distributed.DistNetworkError("connection reset")

    alone = Processes(1, 2, 1, 2, Gone())
    with pytest.raises(ZeroDivisionError), alone.reporting_failures():
        raise ZeroDivisionError


def environ(**changed):
    numbers = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **changed}


@pytest.mark.parametrize("name", VARIABLES[:4])
@pytest.mark.parametrize("text", ["", "two", "1.0"])
def test_a_variable_that_is_no_number_is_named(name, text):
    with pytest.raises(ConfigError) as caught:
        join_processes(environ(**{name: text}))
    assert str(caught.value) == f"{name} = {text!r}: must be a number, as torchrun sets it"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "3"}, "RANK = 3: must be 0 to 2"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2: must be 0 to 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK = 2: must be 0 to 1"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK = -1: must be 0 to 1"),
    ],
)
def test_a_rank_beyond_its_size_is_named(changed, said):
    with pytest.raises(ConfigError, match=f"^{said}, as torchrun sets it$"):
        join_processes(environ(**changed))


@pytest.mark.parametrize("set_one", ["RANK", "WORLD_SIZE"])
def test_all_missing_variables_are_named(set_one):
    with pytest.raises(ConfigError) as caught:
        join_processes({set_one: "1"})
    missing = ", ".join(name for name in VARIABLES if name != set_one)
    assert caught.value.value == missing


def test_processes_meet_by_torchruns_variables(monkeypatch):
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port = {"MASTER_PORT": str(store.port)}
    ranks = [("0", "0", "2"), ("1", "1", "2"), ("2", "0", "1")]
    settings = [
        environ(RANK=rank, LOCAL_RANK=local, LOCAL_WORLD_SIZE=size, **port)
        for rank, local, size in ranks
    ]
    for name, value in settings[0].items():
        monkeypatch.setenv(name, value)
    found = {}

    def join(given):
        found[given["RANK"]] = join_processes(given)

    threads = [threading.Thread(target=join, args=(given,), daemon=True) for given in settings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    processes = [found[rank] for rank, _, _ in ranks]
    assert [(p.rank, p.size, p.local_rank, p.local_size) for p in processes] == [
        (0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)
    ]  # fmt: skip
    assert in_threads(lambda p: p.gather("x", str(p.rank)), processes) == [["0", "1", "2"]] * 3
    assert all(p.pulse.is_alive() for p in processes)
    in_threads(Processes.end, processes)
    assert not any(p.pulse.is_alive() for p in processes)
