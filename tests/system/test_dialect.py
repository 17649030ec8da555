"""The style gauge: its rules, its ratchet, and its checks of commits."""

# dialect: ignore file (samples of the wording that the rules find)

import json
import subprocess
from pathlib import Path

import pytest
from tools import dialect

MARKER = "dialect" + ": ignore"
OLD_PAGE = "Nobody waits here.\n\nSomebody waits there.\n\nIt is told of that.\n"
GOOD_PAGE = "The reader waits.\n"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("headless who", "A lock is held by who waits."),
        ("headless what", "A copy of what came."),
        ("anonymous agent", "It waits until somebody rings."),
        ("postposed bound", "Tasks, 64 at most."),
        ("so many", "Send so many bytes."),
        ("is none", "A value that is none."),
        ("there is no", "0x3 is no multiple of 4."),
        ("verb of speech", "The drive is told at once."),
        ("where for if", "It ends, also where it failed."),
        ("pronoun noun", "A page of ours."),
        ("archaic", "The kernel starts anew."),
        ("everyday noun", "The page lies in the cache."),
        ("noun fragment", "Seconds after which a reader gives up."),
    ],
)
def test_each_rule_finds_its_wording(rule: str, text: str) -> None:
    assert [hit.rule for hit in dialect.measure(text + "\n", ".md").hits] == [rule]
    assert [hit.rule for hit in dialect.measure(f"# {text}\n", ".py").hits] == [rule]
    assert [hit.rule for hit in dialect.measure(f"/* {text} */\n", ".c").hits] == [rule]


def test_every_rule_has_a_sample() -> None:
    marks = test_each_rule_finds_its_wording.pytestmark
    assert [sample[0] for sample in marks[0].args[1]] == [rule.name for rule in dialect.RULES]


def test_good_sentences_have_no_hits() -> None:
    text = (
        "Return what you need if the number of tasks is None.\nAt most 64 tasks wait for a page that a reader holds.\n"
    )
    assert not dialect.measure(text, ".md").hits


def test_python_names_comments_and_strings_are_read() -> None:
    source = (
        "def told(given, count):\n"
        '    """Wait.\n\n    Nobody\n    waits.\n    """\n'
        "    its = 1  # of ours\n"
        "    # a comment that\n"
        "    # somebody wraps\n"
        '    return f"so many {its}"\n'
    )
    hits = {(hit.line, hit.rule) for hit in dialect.measure(source, ".py").hits}
    names = {(1, "vague name"), (7, "vague name")}
    assert hits == {*names, (4, "anonymous agent"), (7, "pronoun noun"), (9, "anonymous agent"), (10, "so many")}
    assert sum(hit.line == 1 for hit in dialect.measure(source, ".py").hits) == 2


def test_code_and_links_of_pages_are_not_read() -> None:
    page = "`nobody` and [a link](nobody.md)\n\n```python\nnobody = somebody\n```\n\nNobody waits.\n"
    assert [hit.line for hit in dialect.measure(page, ".md").hits] == [7]


def test_markers_exempt_a_line_or_a_file_and_need_a_reason() -> None:
    source = f"# nobody\n\nits = 1  # {MARKER} (a term of the format)\n\n# nobody  {MARKER}\n"
    report = dialect.measure(source, ".py")
    assert [hit.line for hit in report.hits] == [1]
    assert report.markers == [(3, "a term of the format"), (5, "")]
    assert not dialect.measure(f"<!-- {MARKER} file (old words) -->\n" + OLD_PAGE, ".md").hits
    assert dialect.measure(f"Mentions {MARKER} in a sentence.\n", ".md").markers == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository with a baseline that exempts ``old.md``."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "old.md").write_text(OLD_PAGE)
    (tmp_path / "good.md").write_text(GOOD_PAGE)
    (tmp_path / dialect.BASELINE).write_text(dialect.Baseline(["room"], {"old.md": 3}).dump())
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    settings = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", root, *settings, *arguments], check=True, capture_output=True)


def commit(root: Path, subject: str = "Add a page") -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", subject)


def violations(root: Path, *paths: str) -> str:
    return "\n".join(dialect.Gauge(root, paths).violations())


def test_new_files_must_meet_the_limit(root: Path) -> None:
    assert not violations(root)
    (root / "new.md").write_text(OLD_PAGE)
    assert "new.md: 3 hits in 3 lines, scores 75.0; the limit is 10" in violations(root)
    assert "new.md:1: anonymous agent: Nobody waits here." in violations(root, "new.md")
    assert not violations(root, "good.md")
    (root / "new.md").write_text("Nobody waits here.\n\nSomebody waits there.\n")
    assert not violations(root), "two hits are below the smallest number"


def test_exempt_files_must_not_get_worse(root: Path) -> None:
    (root / "old.md").write_text(f"Whoever waits, waits.\n\n{OLD_PAGE}")
    found = violations(root)
    assert "old.md: 4 hits in 4 lines, more than the 3 that tools/dialect.json records" in found
    assert "headless who" in found and "anonymous agent" not in found, "only the new hit is listed"


def test_rewritten_rooms_have_a_lower_limit(root: Path) -> None:
    (root / "room").mkdir()
    for k in range(3):
        (root / "room" / f"{k}.md").write_text("Nobody waits.\n" + GOOD_PAGE * 400)
    assert not violations(root)
    (root / "room" / "3.md").write_text("Nobody waits.\n")
    assert "room: scores 3.3; the limit of a rewritten room is 3" in violations(root)


def test_counts_follow_moved_and_split_files(root: Path) -> None:
    git(root, "mv", "old.md", "moved.md")
    assert not violations(root)
    commit(root)
    baseline = root / dialect.BASELINE
    baseline.write_text(baseline.read_text().replace('"room"', '"room", "area"'))
    commit(root, "Mark a room as rewritten")
    assert not violations(root), "the move is older than the last change of the baseline"
    (root / "moved.md").write_text(f"Whoever waits, waits.\n\n{OLD_PAGE}")
    assert "moved.md: 4 hits in 4 lines, more than the 3" in violations(root)
    updated = dialect.Gauge(root).updated_baseline()
    assert updated.files == {}, "a file that got worse is not recorded"
    (root / "moved.md").write_text(OLD_PAGE)
    assert dialect.Gauge(root).updated_baseline().files == {"moved.md": 3}


def test_files_are_matched_by_base_name_without_git(root: Path) -> None:
    assert dialect.find_sources(["b/x.md"], {"a/x.md": 3}, ["b/x.md"], {}) == {"b/x.md": "a/x.md"}
    assert dialect.find_sources(["b/x.md"], {"a/x.md": 3}, ["b/x.md", "a/x.md"], {}) == {}
    assert dialect.find_sources(["b/x.md"], {"a/x.md": 3, "c/x.md": 3}, ["b/x.md"], {}) == {}


def test_parts_of_a_file_share_its_count() -> None:
    sources = {"one.md": "old.md", "two.md": "old.md"}
    assert not dialect.excess({"one.md": 4, "two.md": 6}, {"old.md": 10}, sources)
    assert dialect.excess({"one.md": 5, "two.md": 6}, {"old.md": 10}, sources) == {"one.md": 10, "two.md": 10}
    assert dialect.excess({"old.md": 4, "two.md": 7}, {"old.md": 10}, sources) == {"two.md": 10}


def test_updates_only_lower_counts(root: Path) -> None:
    (root / "old.md").write_text(f"Whoever waits, waits.\n\n{OLD_PAGE}")
    (root / "new.md").write_text(OLD_PAGE)
    assert dialect.main(["--update"], root) == 1
    assert json.loads((root / dialect.BASELINE).read_text())["files"] == {"old.md": 3}
    (root / "new.md").unlink()
    (root / "old.md").write_text(GOOD_PAGE)
    assert dialect.main(["--update"], root) == 0
    assert json.loads((root / dialect.BASELINE).read_text()) == {"rewritten": ["room"], "files": {}}


def test_a_raised_count_in_the_baseline_is_found(root: Path) -> None:
    baseline = root / dialect.BASELINE
    baseline.write_text(dialect.Baseline([], {"old.md": 4, "new.md": 5}).dump())
    commit(root, "Raise a count")
    found = violations(root)
    assert "the count of old.md was raised from 3 to 4" in found
    assert "new.md was added" in found and "room was removed from the rewritten rooms" in found
    baseline.write_text(dialect.Baseline(["room"], {"old.md": 3}).dump())
    assert not violations(root)


def test_the_number_of_markers_is_limited(root: Path) -> None:
    (root / "x.py").write_text(f"its = 1  # {MARKER} (a term)\n" * 31 + f"its = 1  # {MARKER}\n")
    found = violations(root)
    assert "32 lines hold `dialect: ignore`; the limit of the repository is 30" in found
    assert "x.py:32: dialect: ignore needs a reason" in found


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Retry accept() on EMFILE in the driver server", ""),
        ("kv: Retry reads of replaced values", ""),
        ("A server without descriptors waits", "must start with an imperative, got 'A'"),
        ("Fixes a leak", "must start with an imperative, got 'Fixes'"),
        ("fix a leak", "must start with a capital, got 'fix'"),
        ("Fix a leak.", "must not end with a period"),
        ("Fix " + "a" * 70, "has 74 characters; the limit is 72"),
    ],
)
def test_commit_subjects(subject: str, problem: str) -> None:
    assert dialect.subject_problems(subject) == [problem] * bool(problem)


def test_commits_and_messages_are_checked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit_file = root / "message"
    commit_file.write_text("Fix a leak\n\nThe file was not closed.\n# a comment\n")
    assert dialect.main(["--message", str(commit_file)], root) == 0
    commit_file.write_text("Fix a leak\nof a file\n")
    assert dialect.main(["--message", str(commit_file)], root) == 1
    assert "must be followed by a blank line" in capsys.readouterr().err
    commit(root, "Nobody waits")
    assert dialect.main(["--commits", "HEAD~1.."], root) == 1
    assert "'Nobody waits' must start with an imperative" in capsys.readouterr().err
    assert dialect.main(["--commits", "HEAD~1"], root) == 0


def test_scores_are_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dialect.main([str(root / "old.md")], root) == 0
    printed = capsys.readouterr().out
    assert "3 hits in" in printed and "old.md:1: anonymous agent: Nobody waits here." in printed
