"""Traces: public files, tables that are read and written, and invalid files."""

import gzip
import io
import math
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.sched.traces import orion, synthetic, table
from lab.sched.traces.arrivals import arrivals
from lab.sched.traces.recipe import Recipe
from lab.sched.traces.trace import Arrival, Arrivals, Trace, TracedApplication, TracedKernel, compose, select
from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Kind

ORION = """Name,Profile,Memory_footprint,SM_usage,Duration
Conv,1,0,98,100480
BatchNorm,0,0,64,40480
relu,-1,0,2,3232
Conv,-1,0,1,1000
"""
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:50.9,1,1"
)
ALIBABA = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,\
creation_time,deletion_time,scheduled_time
a,12000,16384,1,1000,,LS,Running,10,12537496,0
b,6000,12288,1,460,,BE,Running,5,12902960,427061
c,6000,12288,0,0,,LS,Running,1,12902960,427061
"""


def archive(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"models/{name}")
            content = text.encode()
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


# -- Orion ---------------------------------------------------------------------------------------------------
def test_orion(tmp_path):
    path = archive(tmp_path / "o.tar.gz", {"a_fwd": ORION, "a_fb0": ORION, "b_fb1": ORION, "LICENSE": "MIT\n"})
    models = orion.read(path)
    assert [a.name for a in models.applications] == ["a_fwd", "b_fb1"]
    assert models.left_out == ["LICENSE", "a_fb0"]
    conv, norm, relu, small = models.applications[0].kernels
    assert (conv.name, conv.profile.kind, conv.profile.need) == ("Conv", Kind.COMPUTE, 1)
    assert conv.profile.seconds == pytest.approx(100480e-9)
    assert (norm.profile.kind, norm.profile.need, norm.blocks) == (Kind.MEMORY, 0.8, 512)
    assert (relu.profile.kind, relu.profile.source) == (Kind.MEMORY, "imputed")  # no other kernel has this name
    # Other kernels of this name are compute-intensive.
    assert (small.profile.kind, small.profile.source) == (Kind.COMPUTE, "imputed")
    assert "4 of 8" in models.imputed["class"] and "memory" in models.imputed
    assert models.applications[0].seconds == pytest.approx(145192e-9)


def test_orion_as_a_folder_and_as_one_file(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a_fwd").write_text(ORION)
    for path in (tmp_path / "models", tmp_path / "models" / "a_fwd"):
        assert [a.name for a in orion.read(path).applications] == ["a_fwd"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Duration\n", "Duration,Color\n", "Color"),
        (",SM_usage", "", "SM_usage"),
        ("100480", "-1", "line 2.*Duration.*'-1'"),
        (",64,", ",-64,", "line 3.*SM_usage"),
        ("100480", "long", "long"),
        ("Conv,1,", "Conv,0.5,", "Profile"),
        ("Conv,1,", "Conv,7,", "Profile"),
        ("100480", "nan", "nan"),
        (",64,40480", ",64", "line 3.*4 values"),
        ("Conv,1,0,", "Conv,1,-5,", "Memory_footprint"),
        ("Conv,1,0,", "Conv,1,0.5,", "whole"),
    ],
)
def test_orion_damaged(tmp_path, old, new, says):
    text = ORION.replace(old, new)
    if old == ",SM_usage":
        text = "\n".join(",".join(line.split(",")[:3] + line.split(",")[4:]) for line in ORION.splitlines())
    path = archive(tmp_path / "o.tar.gz", {"a_fwd": text})
    with pytest.raises(errors.FormatError, match=says):
        orion.read(path)


def test_no_profiles(tmp_path):
    with pytest.raises(errors.MissingFileError):
        orion.read(tmp_path / "none")
    with pytest.raises(errors.FormatError, match="no kernel profiles"):
        orion.read(archive(tmp_path / "o.tar.gz", {"LICENSE": "MIT\n", "a_fb0": ORION}))
    (tmp_path / "cut.tar.gz").write_bytes((tmp_path / "o.tar.gz").read_bytes()[:60])
    with pytest.raises(errors.FormatError):
        orion.read(tmp_path / "cut.tar.gz")
    with pytest.raises(errors.FormatError, match="no kernels"):
        orion.read(archive(tmp_path / "e.tar.gz", {"a_fwd": ORION.splitlines()[0] + "\n"}))


# -- arrivals ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [False, True])
def test_azure(tmp_path, packed):
    path = tmp_path / "azure.csv"
    path.write_bytes(gzip.compress(AZURE.encode()) if packed else AZURE.encode())
    found = arrivals(path)
    assert found.times == pytest.approx([0.0, 4.21941, 4.314579])
    assert found.priorities is None and found.name == "azure.csv"


def test_alibaba(tmp_path):
    path = tmp_path / "pods.csv"
    path.write_text(ALIBABA)
    found = arrivals(path)
    assert found.times.tolist() == [0.0, 5.0]
    assert found.priorities is not None and found.priorities.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (AZURE.replace("ContextTokens", "Tokens"), "Tokens"),
        (AZURE.replace("374", "-374"), "line 2.*ContextTokens"),
        (AZURE.replace("2023-11-16 18:15:46.6805900", "yesterday"), "line 2.*yesterday"),
        (AZURE.split("\r\n")[0], "no arrivals"),
        (ALIBABA.replace(",BE,", ",VIP,"), "line 3.*VIP"),
        (ALIBABA.replace("Running,10,", "Running,-10,"), "creation_time"),
        ("a,b\n1,2\n", "no arrivals"),
        ("", "no arrivals"),
        (ALIBABA.splitlines()[0], "no arrivals"),
    ],
)
def test_damaged_arrivals(tmp_path, text, says):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(errors.FormatError, match=says):
        arrivals(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(errors.MissingFileError):
        arrivals(tmp_path / "none.csv")
    with pytest.raises(errors.MissingFileError):
        arrivals(tmp_path)
    (tmp_path / "b").write_bytes(b"\x1f\x8bnot gzip at all")
    with pytest.raises(errors.FormatError):
        arrivals(tmp_path / "b")
    (tmp_path / "c").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(errors.FormatError):
        arrivals(tmp_path / "c")


# -- the table -----------------------------------------------------------------------------------------------
TABLE = """# two requests
request,arrival,kernel,seconds,kind,blocks,priority,tenant,need
1,0.5,gemm,1e-3,compute,100,2,ann,1
1,0.5,copy,2e-3,memory,,,,0.5
2,0,copy,2e-3,memory,50,-1,,0.5
"""


def test_a_line_that_is_no_record(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("[" * 200_000)
    with pytest.raises(errors.FormatError, match=r"t\.csv, line 1: field larger.*pass a file of rows"):
        table.read(path)


def test_a_table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    found = table.read(path)
    assert [(a.time, a.application.name, a.tenant, a.priority) for a in found.arrivals] == [
        (0.0, "copy", "default", -1),
        (0.5, "gemm", "ann", 2),
    ]
    gemm, copy = found.arrivals[1].application.kernels
    assert (gemm.blocks, gemm.profile.kind, gemm.profile.seconds) == (100, Kind.COMPUTE, 1e-3)
    assert (copy.blocks, copy.profile.need) == (Profile().resident, 0.5)
    assert {"registers", "miss_rate"} <= set(found.imputed) and "need" not in found.imputed


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("priority", "urgency", "unknown column 'urgency'.*priority"),
        ("0.5,gemm", "-0.5,gemm", "line 3: arrival is '-0.5'"),
        ("gemm,1e-3", "gemm,-1e-3", "line 3: seconds"),
        ("compute,100", "compute,-100", "blocks"),
        ("compute,100", "compute,0", "blocks"),
        ("compute,100", "compute,1.5", "whole"),
        ("compute", "big", "kind"),
        ("ann,1", "ann,1.5", "need.*0 to 1"),
        ("100,2", "100,2.5", "priority"),
        ("seconds", "kernel", "two columns"),
        ("request,", "", "no column 'request'"),
        ("gemm,1e-3", "gemm,inf", "inf"),
        ("gemm,1e-3", "gemm,", "seconds"),
    ],
)
def test_a_damaged_table(tmp_path, old, new, says):
    path = tmp_path / "t.csv"
    path.write_text(TABLE.replace(old, new, 1))
    with pytest.raises(errors.FormatError, match=says):
        table.read(path)


def test_more_that_a_table_can_have_wrong(tmp_path):
    path = tmp_path / "t.csv"
    for column, value in (
        ("memory", "-1"),
        ("instructions", "-1"),
        ("registers", "-4"),
        ("miss_rate", "2"),
    ):
        path.write_text(f"request,arrival,kernel,seconds,{column}\n1,0,k,1,{value}\n")
        with pytest.raises(errors.FormatError, match=f"line 2.*{column}"):
            table.read(path)
    path.write_text("request,arrival,kernel,seconds\n")
    with pytest.raises(errors.FormatError, match="no kernels"):
        table.read(path)
    with pytest.raises(errors.MissingFileError):
        table.read(tmp_path / "none.csv")


kernels = st.builds(
    TracedKernel,
    st.text("abc, \"'#é", min_size=1, max_size=5),
    st.builds(
        Profile,
        kind=st.sampled_from([Kind.MEMORY, Kind.COMPUTE, None]),
        seconds=st.floats(0, 1e3),
        instructions=st.none() | st.floats(0, 1e12),
        registers=st.integers(0, 1 << 20),
        resident=st.integers(1, 5000),
        miss_rate=st.floats(0, 1),
        need=st.floats(0, 1),
        source=st.just("trace"),
    ),
    st.integers(1, 1 << 40),
    st.integers(0, 1 << 40),
    st.booleans(),
)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.lists(kernels, min_size=1, max_size=3), st.integers(-3, 3)),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=40)
def test_what_is_written_is_read(tmp_path_factory, plan):
    plan = sorted(plan, key=lambda p: p[0])
    workload = Trace("w", [Arrival(t, TracedApplication("app", tuple(chain)), "t", level) for t, chain, level in plan])
    path = tmp_path_factory.getbasetemp() / "written.csv"
    table.write(workload, path)
    again = table.read(path)
    assert [(a.time, a.tenant, a.priority, a.application) for a in again.arrivals] == [
        (a.time, a.tenant, a.priority, a.application) for a in workload.arrivals
    ]


def test_a_table_into_a_folder_that_is_not_there(tmp_path):
    workload = Recipe(kernels=1).make()
    with pytest.raises(errors.MissingFileError, match="create the folder"):
        table.write(workload, tmp_path / "none" / "t.csv")


# -- composing -----------------------------------------------------------------------------------------------
def apps(count=3, seconds=0.5):
    return [
        TracedApplication(f"a{i}", tuple(TracedKernel("k", Profile(seconds=seconds)) for _ in range(i + 1)))
        for i in range(count)
    ]


@given(st.floats(0.1, 10.0), st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=40)
def test_time_is_compressed_to_the_load(load, count, seed):
    times = Arrivals("x", np.sort(np.random.default_rng(seed).uniform(0, 100, 100)))
    plan = compose(apps(), times, kernels=count, load=load, seed=seed)
    workload = Trace("w", plan)
    assert workload.kernels >= count > workload.kernels - len(plan[-1].application.kernels)
    assert plan[0].time == 0.0
    if len(plan) > 1:
        assert workload.load == pytest.approx(load)
        gaps = np.diff([a.time for a in plan]) / np.diff(times.times[: len(plan)])
        assert gaps == pytest.approx(gaps[0])
    assert [a.application.name for a in compose(apps(), times, kernels=count, load=load, seed=seed)] == [
        a.application.name for a in plan
    ]


def test_a_backlog_and_priorities():
    times = Arrivals("x", np.arange(50.0), np.arange(50) % 2)
    plan = compose(apps(), times, kernels=20, load=math.inf, seed=1, urgent=1.0)
    assert {a.time for a in plan} == {0.0}
    assert [a.priority for a in plan] == [i % 2 for i in range(len(plan))]
    urgent = compose(apps(), Arrivals("x", np.arange(50.0)), kernels=20, load=1.0, seed=1, urgent=1.0)
    assert {a.priority for a in urgent} == {1}


def test_what_cannot_be_composed():
    times = Arrivals("x", np.arange(3.0))
    with pytest.raises(errors.ArgumentError, match="3 arrivals"):
        compose(apps(), times, kernels=1000, load=1.0, seed=0)
    for options in ({"kernels": 0}, {"load": 0.0}, {"load": math.nan}, {"urgent": 1.5}):
        with pytest.raises(errors.ArgumentError, match=next(iter(options))):
            Recipe(**options)
    with pytest.raises(errors.ArgumentError, match="a0, a1, a2"):
        select(apps(), "b*")
    assert [a.name for a in select(apps(), "a1, *2")] == ["a1", "a2"]


def test_predictions_err_by_as_much_as_they_should():
    plan = compose(
        [TracedApplication("a", tuple(TracedKernel("k", Profile(seconds=1.0)) for _ in range(2000)))],
        Arrivals("x", np.arange(3.0)),
        kernels=6000,
        load=1.0,
        seed=0,
    )
    requests, truth = Trace("w", plan).requests(0.05, seed=4)
    ratios = np.array([task.profile.seconds for task in requests[0].tasks])
    assert np.median(np.abs(np.log(ratios))) == pytest.approx(math.log(1.05), rel=0.1)
    assert all(truth[task].seconds == 1.0 for task in requests[0].tasks)
    assert requests[0].tasks[7].profile is requests[2].tasks[7].profile
    exact, no_truth = Trace("w", plan).requests()
    assert no_truth == {} and exact[0].tasks[0].profile.seconds == 1.0


# -- recipes -------------------------------------------------------------------------------------------------
def test_recipes(tmp_path):
    path = archive(tmp_path / "o.tar.gz", {"a_fwd": ORION, "b_fwd": ORION, "a_fb0": ORION, "a_fb1": ORION})
    azure = tmp_path / "azure.csv"
    azure.write_text(AZURE)
    workload = Recipe(str(path), str(azure), kernels=8, load=0.5, seed=3).make()
    assert workload.load == pytest.approx(0.5) and len(workload.arrivals) == 2
    assert workload.details["applications"] == ["a_fwd", "b_fwd"]
    assert (workload.details["placeholders"], workload.details["not_drawn"]) == (["a_fb0"], ["a_fb1"])
    assert {"class", "blocks", "priority"} <= set(workload.imputed)
    assert workload.capacity.processors == 80
    everything = Recipe(str(path), models="*", kernels=8).make()
    assert everything.details["applications"] == ["a_fb1", "a_fwd", "b_fwd"]
    with pytest.raises(errors.ArgumentError, match="arrivals"):
        Recipe(str(path), str(azure), kernels=100).make()
    with pytest.raises(errors.ArgumentError, match="seed"):
        Recipe(seed=-1)


def test_a_table_says_when_requests_arrive(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    assert Recipe(str(path)).make().load == pytest.approx(0.01)
    assert Recipe(str(path), load=2.0).make().load == pytest.approx(2.0)
    with pytest.raises(errors.ArgumentError, match="--arrivals"):
        Recipe(str(path), "azure.csv").make()
    with pytest.raises(errors.MissingFileError):
        Recipe(str(tmp_path / "none.csv")).make()
    (tmp_path / "other.csv").write_text("color,taste\n1,2\n")
    with pytest.raises(errors.FormatError, match="color"):
        Recipe(str(tmp_path / "other.csv")).make()


@pytest.mark.parametrize("name", synthetic.MIXES)
def test_built_in_mixes(name):
    workload, again = Recipe(mix=name, kernels=200, seed=5).make(), Recipe(mix=name, kernels=200, seed=5).make()
    assert workload.arrivals == again.arrivals != Recipe(mix=name, kernels=200, seed=6).make().arrivals
    kinds = {k.profile.kind for a in workload.arrivals for k in a.application.kernels}
    assert kinds == {Kind.MEMORY, Kind.COMPUTE}
    is_pure = [len({k.profile.kind for k in a.application.kernels}) == 1 for a in workload.arrivals]
    assert all(is_pure) if name == "pure" else not any(is_pure)
    with pytest.raises(errors.ArgumentError, match="half"):
        synthetic.mix("none", 0)


def test_arrivals_at_random():
    times = synthetic.poisson(20_000, 7).times
    assert times[0] == 0.0 and np.all(np.diff(times) >= 0)
    assert np.array_equal(times, synthetic.poisson(20_000, 7).times)
    assert not np.array_equal(times, synthetic.poisson(20_000, 8).times)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)
