"""C files have levels: their dependencies contain no cycle."""

import shutil
from pathlib import Path

from tools import c_calls

FOLDERS = [c_calls.ROOT / folder for folder in c_calls.FOLDERS]


def test_no_call_closes_a_cycle() -> None:
    found = c_calls.problems(c_calls.cycles(FOLDERS))
    assert not found, "\n".join(found)


def test_a_variable_and_an_inline_function_are_dependencies(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("extern int count, other;\nstatic inline int twice(int x) { return add(x, x); }\n")
    (tmp_path / "a.c").write_text("int count;\nvoid f(void) { twice(1); }\n")
    (tmp_path / "a_b.c").write_text("int add(int x, int y) { return x + y + count; }\n")
    assert c_calls.cycles([tmp_path]) == {"a.c": {"a_b.c": ["add"]}, "a_b.c": {"a.c": ["count"]}}


def test_a_planted_cycle_is_found(tmp_path: Path) -> None:
    """layer_image.c calls no other file of the layer; others call it."""
    native = tmp_path / "native"
    shutil.copytree(FOLDERS[0], native)
    image = native / "layer_image.c"
    image.write_text(image.read_text() + "int planted(void) {\n    return ww_fn_of(0, 0, 0);\n}\n")
    problems = c_calls.problems(c_calls.cycles([native, FOLDERS[1]]))
    assert "layer_image.c uses ww_fn_of of layer_code.c, which closes a cycle" in problems


def test_functions_and_calls_are_read() -> None:
    text = """
    #define CALL(x) other(x)
    struct pair { int a, b; };
    int declared(int x);
    /* commented(1); */
    static int own(const char *text) { return strlen(text) + (int)sizeof(struct pair); }
    __attribute__((visibility("default"))) int
    exported(int x)
    {
        if (x) // slashed(2);
            own("quoted(3)");
        return declared(x);
    }
    """
    found = list(c_calls.functions(text))
    assert [(f.name, f.is_static, sorted(f.calls)) for f in found] == [
        ("own", True, ["strlen"]),
        ("exported", False, ["declared", "own"]),
    ]


def test_static_functions_belong_to_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("static void f(void) {}\nvoid g(void) { f(); h(); }\n")
    (tmp_path / "a_b.c").write_text("void f(void) {}\nstatic void g(void) {}\nvoid h(void) { g(); }\n")
    assert c_calls.cycles([tmp_path]) == {}
    (tmp_path / "a_b.c").write_text("void h(void) { g(); }\n")
    assert c_calls.cycles([tmp_path]) == {"a.c": {"a_b.c": ["h"]}, "a_b.c": {"a.c": ["g"]}}
