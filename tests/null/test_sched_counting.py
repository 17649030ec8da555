"""PTX as blocks, loops and weights; walks of warps through hand-written kernels whose counts are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpwell import errors
from warpwell.scheduler.predict import walk as walking
from warpwell.scheduler.predict.lanes import Lanes, as_type, base_address, literal
from warpwell.scheduler.predict.ptx import parse
from warpwell.scheduler.predict.walk import walk

COUNTED = """
.visible .entry counted(.param .u64 first, .param .u64 last, .param .u64 step)
{
    .reg .pred %p<4>; .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [first];
    ld.param.u64 %rd2, [last];   // a comment; with a semicolon
    ld.param.u64 %rd3, [step];
    setp.SKIP.s64 %p1, %rd1, %rd2;
    @%p1 bra $end;
$loop:
    .pragma "nounroll";
    add.s64 %rd1, %rd1, %rd3;
    setp.RELATION.s64 %p2, %rd1, %rd2;
    @%p2 bra $loop;
$end:
    ret;
}
"""

ROWS = """
.visible .entry rows(.param .u64 pointers, .param .u64 extent)
{
    ld.param.u64 %rd1, [pointers];
    ld.param.u64 %rd9, [extent];
    mov.u32 %r1, %tid.x;
    cvt.u64.u32 %rd2, %r1;
    setp.ge.s64 %p1, %rd2, %rd9;
    @%p1 bra $end;
    shl.b64 %rd3, %rd2, 2;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.s32 %rd5, [%rd4];
    ld.global.s32 %rd6, [%rd4+4];
    setp.ge.s64 %p2, %rd5, %rd6;
    @%p2 bra $end;
$loop:
    add.s64 %rd5, %rd5, 1;
    setp.lt.s64 %p3, %rd5, %rd6;
    @%p3 bra $loop;
$end:
    ret;
}
"""


def counted(relation, skip):
    return parse(COUNTED.replace("RELATION", relation).replace("SKIP", skip))


def lanes(parameters, count=32, memory=None):
    return Lanes(count, parameters, {"%tid.x": np.arange(count)}, memory or {})


def test_text_becomes_blocks_and_loops():
    program = counted("lt", "ge")
    assert program.name == "counted" and program.parameters == ["first", "last", "step"]
    assert [len(b.statements) for b in program.blocks] == [5, 3, 1]
    assert [b.successors for b in program.blocks] == [[2, 1], [1, 2], [3]]
    assert program.loops == {1: frozenset({1})}
    assert program.blocks[0].statements[0].kind == "move"


def test_nested_loops_are_told_apart():
    program = parse("""
        .entry nested() {
        $a: add.s32 %r1, %r1, 1;
        $b: add.s32 %r2, %r2, 1;
            setp.lt.s32 %p1, %r2, 9; @%p1 bra $b;
            setp.lt.s32 %p2, %r1, 9; @%p2 bra $a;
            ret; }""")
    assert program.loops == {0: frozenset({0, 1, 2}), 1: frozenset({1})}


def test_inline_assembly_vectors_and_guards_are_read():
    program = parse("""
        .entry odd(.param .align 8 .b8 raw[16]) {
            { .reg .b32 m; activemask.b32 m; add.u32 %r1, m, %r2; }
            ld.global.v2.u64 {%rd1, %rd2}, [%rd3+8];
            @!%p1 st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
            mov.b64 {%r5, %r6}, %rd1;
            ret; }""")
    (block,) = program.blocks
    load, store, split = block.statements[2:5]
    assert program.parameters == ["raw"]
    assert load.writes == ("%rd1", "%rd2") and load.reads == ("%rd3",) and load.nbytes == 16
    assert store.guard == "%p1" and store.negated and store.writes == () and store.nbytes == 16
    assert split.writes == ("%r5", "%r6")


@pytest.mark.parametrize(
    ("text", "weight"),
    [("add.s64 %rd1, %rd2, 1;", 2), ("add.s32 %r1, %r2, 1;", 1), ("fma.rn.f32 %f1, %f2, %f3, %f4;", 1),
     ("cvta.to.global.u64 %rd1, %rd2;", 0), ("mul.wide.u32 %rd1, %r1, %r2;", 1), ("mul.lo.s64 %rd1, %rd2, %rd3;", 4),
     ("div.rn.f32 %f1, %f2, %f3;", 9), ("ex2.approx.ftz.f32 %f1, %f2;", 1)],
)  # fmt: skip
def test_weights_of_statements(text, weight):
    assert parse(f".entry k() {{ {text} ret; }}").blocks[0].total() == weight + 1


@pytest.mark.parametrize("text", ["", ".func f() { ret; }", ".entry k() { ret;", ".entry k() { bra $nowhere; }"])
def test_what_is_no_kernel_is_refused(text):
    with pytest.raises(errors.FormatError):
        parse(text)


@given(first=st.integers(-50, 50), trips=st.integers(0, 5000), step=st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_counted_loops_are_exact_and_passed_at_once(first, trips, step):
    last = first + trips * step
    for relation, skip, sign in (("lt", "ge", 1), ("ne", "eq", 1), ("gt", "le", -1)):
        start, end = (first, last) if sign > 0 else (last, first)
        visits = walk(counted(relation, skip), lanes({"first": start, "last": end, "step": sign * step}), limit=30)
        assert not visits.cut and not visits.assumed
        assert visits.count[1, 0] == trips


def test_rounding_up_and_inclusive_bounds():
    visits = walk(counted("lt", "ge"), lanes({"first": 0, "last": 1001, "step": 10}))
    assert visits.count[1, 0] == 101
    visits = walk(counted("le", "gt"), lanes({"first": 0, "last": 1000, "step": 10}))
    assert visits.count[1, 0] == 101


def test_an_endless_loop_ends_at_the_limit():
    visits = walk(counted("ne", "eq"), lanes({"first": 0, "last": 5, "step": 2}), limit=50)
    assert visits.cut


def rows_of(lengths):
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


@given(lengths=st.lists(st.integers(0, 300), min_size=64, max_size=64))
@settings(max_examples=30, deadline=None)
def test_a_warp_passes_as_often_as_its_longest_row(lengths):
    pointers = rows_of(lengths)
    known = {"pointers": base_address(0), "extent": 64}
    program = parse(ROWS)
    visits = walk(program, lanes(known, 64, {0: pointers}))
    loop = next(iter(program.loops))
    assert visits.count[loop].tolist() == [max(lengths[:32]), max(lengths[32:])]
    assert not visits.assumed


def test_skipping_changes_no_count(monkeypatch):
    pointers = rows_of(np.random.default_rng(3).integers(0, 90, 64))
    known = {"pointers": base_address(0), "extent": 60}
    quick = walk(parse(ROWS), lanes(known, 64, {0: pointers}))
    monkeypatch.setattr(walking._Walk, "_skip", lambda *_: None)
    slow = walk(parse(ROWS), lanes(known, 64, {0: pointers}))
    assert np.array_equal(quick.count, slow.count)


def test_data_that_cannot_be_read_is_assumed_and_said_so():
    program = parse(ROWS)
    visits = walk(program, lanes({"pointers": base_address(0), "extent": 64}, 64), trips=11)
    assert visits.assumed
    assert visits.count[next(iter(program.loops))].tolist() == [11, 11]


def test_sectors_of_accesses():
    program = parse("""
        .entry reads(.param .u64 a) {
            ld.param.u64 %rd1, [a];
            mov.u32 %r1, %tid.x;
            cvt.u64.u32 %rd2, %r1;
            ld.global.f32 %f1, [%rd1];
            shl.b64 %rd3, %rd2, 2;
            add.s64 %rd4, %rd1, %rd3;
            ld.global.f32 %f2, [%rd4];
            shl.b64 %rd5, %rd2, 8;
            add.s64 %rd6, %rd1, %rd5;
            st.global.f32 [%rd6], %f2;
            ld.global.u32 %r2, [%rd4];
            mul.wide.u32 %rd7, %r2, 4;
            add.s64 %rd8, %rd1, %rd7;
            ld.global.f32 %f3, [%rd8];
            ret; }""")
    visits = walk(program, lanes({"a": base_address(0)}))
    assert [visits.sectors[0, k] for k in (3, 6, 9, 10, 13)] == [1, 4, 32, 4, 32]


def test_literals_and_types():
    assert literal("0f3F800000") == 1.0 and literal("0dBFF0000000000000") == -1.0
    assert literal("-5") == -5 and literal("0xFFFFFFFFFFFFFFFF") == -1 and literal("7U") == 7
    words = np.array([-1, 1 << 40, (1 << 31) + 3])
    assert as_type(words, "u32").tolist() == [0xFFFFFFFF, 0, (1 << 31) + 3]
    assert as_type(words, "s32").tolist() == [-1, 0, 3 - (1 << 31)]
    assert as_type(np.array([1.5]), "b32").tolist() == [0x3FC00000]
    assert as_type(np.array([0x3FC00000]), "f32").tolist() == [1.5]
