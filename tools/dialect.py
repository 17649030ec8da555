"""Measure the wording of code, documentation and commits against ``docs/style-guide.md``.

    python tools/dialect.py [PATH ...]             scores by room, and the files with the highest scores
    python tools/dialect.py --check [PATH ...]     compare with the limits and with tools/dialect.json (`make gauge`)
    python tools/dialect.py --update               lower the recorded counts of tools/dialect.json
    python tools/dialect.py --commits main..       check commit subjects
    python tools/dialect.py --message FILE         check the commit message in a file

A score is the number of hits per 1,000 non-blank lines. A file with at least three hits must not score above 10, and a
room that tools/dialect.json lists as rewritten must not score above 3. tools/dialect.json also records the hits of
files above the limit. A recorded count can only decrease; it follows a file that git recognizes as moved or split.

The tool reads docstrings, comments, strings and defined names of Python, comments and strings of C, and the prose of
Markdown and reStructuredText. A line that ends in ``dialect: ignore (REASON)`` is not counted. A file in which a line
ends in ``dialect: ignore file (REASON)`` is not counted at all. The repository may hold 30 of these markers.
"""
# The patterns contain the old wording. dialect: ignore file (the rules name what they look for)

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "tools/dialect.json"
FILE_LIMIT = 10.0
"""Highest score of a file with at least `MIN_HITS` hits, in hits per 1,000 lines."""
MIN_HITS = 3
ROOM_LIMIT = 3.0
"""Highest score of a rewritten room, in hits per 1,000 lines."""
SHORT_FILE = 40
"""A shorter file is scored as if it had this number of lines."""
MAX_MARKERS = 30
"""Largest number of ``dialect: ignore`` markers in the repository."""
SUBJECT_LENGTH = 72


@dataclass(frozen=True)
class Rule:
    """A wording that the style guide replaces.

    Parameters
    ----------
    name : str
    pattern : re.Pattern
        Matches each occurrence in running text.
    advice : str
        The replacement, for the message.
    """

    name: str
    pattern: re.Pattern[str]
    advice: str


def _rule(name: str, advice: str, *patterns: str, flags: re.RegexFlag = re.MULTILINE | re.IGNORECASE) -> Rule:
    return Rule(name, re.compile("|".join(patterns), flags), advice)


_CLAUSE = (
    r"(?:^|(?<=[.;:,(]\s)|(?<=[-\u2013]\s)|(?<=\b(?:and|but|for|the)\s)|(?<=\b(?:of|by|to|as|in|at|so|if)\s)"
    r"|(?<=\b(?:than|with|from|lets|that|when)\s))"
)
"""Start of a clause: the beginning of a passage, punctuation, or a conjunction or preposition."""
_PASSIVE = r"\b(?:is|are|was|were|be|been|gets?|not) "
_UNIT = r"Seconds|Bytes|Times|Rows|Pages|Kernels|Decisions|Part|How (?:many|often|long)|Words?|Names?|Places?|Numbers?"
_RELATIVE = r"that|which|after which|for which|in which|from which|between two|of which|at which|with which|by which"

RULES = (
    _rule(
        "headless who",
        "put a noun in front of the clause",
        _CLAUSE + r"(?:who|whoever|whose)\s+(?!is responsible|should read|are you)[a-z]+",
    ),
    _rule(
        "headless what",
        "name the thing",
        _CLAUSE + r"what(?:ever)?\s+(?!to\b|if\b|you\b|we\b|does\b|do\b|happen|version|are the\b|is the\b|is a\b"
        r"|it does|this\b|(?:is|was|went) wrong|(?:is|was) expected|comes next)[a-z]+",
    ),
    _rule("anonymous agent", "name the actor", r"\b(?:nobody|somebody|anybody)(?:'s)?\b"),
    _rule(
        "postposed bound",
        "write the bound in front of the noun",
        r"\bat the (?:least|most|latest|earliest|soonest)\b",
        r",? at (?:most|least)(?=[.;:)\"]|\n\n|$)",
    ),
    _rule(
        "so many",
        "write N, or name the quantity",
        r"\b(?:so (?:many|soon)|as (?:many|much|long|soon) as (?:these|those|they|that|stand|there)\b|of so many)\b",
    ),
    _rule(
        "is none",
        "negate the verb",
        r"\b(?:is|are|was|were|has|have|had|leaves|be) none\b",
        r"\bnone of (?:ours|theirs|mine|its|the tests'|them's)\b",
        flags=re.MULTILINE,  # a capital marks the constant None
    ),
    _rule(
        "there is no",
        "negate the verb",
        r"\bthere (?:is|are|was|were) (?:nothing|none|neither|nobody)\b",
        r"\bis no (?:multiple|float|graph|table|store|memory|integer|number|such)\b",
    ),
    _rule(
        "verb of speech",
        "data is sent, recorded or reported",
        _PASSIVE + r"(?:told|said|heard)\b",
        r"\b(?:tells?|told) (?:of|how|what|which|whether|who|that|by|nobody|the)\b",
        r"\bsays? (?:so|which|what|how|whether|where|who)\b",
    ),
    _rule(
        "where for if",
        "write if or when",
        r"\b(?:also|only|even|but|and|for|it|not|is) where\b",
        r"\b[Ww]here (?:nothing|nobody|somebody|none|that is not|one is|these|it is not|there is)\b",
    ),
    _rule(
        "pronoun noun",
        "repeat the noun",
        r"\bthe ones? (?:of|that|who|which|with|in|behind|before)\b",
        r"\bof (?:theirs|ours|mine|yours|somebody)\b",
        r"\b(?:those|that|these) of (?!the same)\w+",
        r"\bone of (?:ours|these)\b",
    ),
    _rule(
        "archaic",
        "use today's word",
        r"\b(?:anew|lately|in vain|for ever|besides|hither|thereof|whereby|wherein|in place of)\b",
        r"\b(?:have it (?:that|so)|nor)\b",
    ),
    _rule(
        "everyday noun",
        "use the field's word",
        r"\b(?:lies?|lying|lay|stands?|stood) (?:on|in|at|there|behind|before|under|beside|over|first|last)\b",
        r"\bgo(?:es)? (?:on|the way)\b",
        r"\bmay (?:come|go)\b",
        r"\bby then\b",
        r"\bbeside\b",
    ),
    _rule("noun fragment", "state the limit and its unit", rf"^\W*(?:{_UNIT}) (?:{_RELATIVE})\b"),
)

VAGUE_NAMES = frozenset(
    """
    its one ones most least some others other these those them they who what whose there here none nobody mine ours
    theirs told said tell say heard hear asked ask words lines places goes go lets let_go stays stay comes came come
    waits bring brings brought given gives give take_off taken kept gone seen begun had has known wanted wants soon
    late often rest about beside apart alike whole thing things way ways place
    """.split()
)
"""Names without a noun or a verb phrase, in lower case and without leading and trailing underscores."""

VERBS = frozenset(
    """
    accept account adapt add adjust adopt advance align allocate allow annotate answer append apply assert assign
    attach avoid backport batch bench benchmark bind block bound break bring build bump bundle cache call cancel cap
    capture
    catch change check choose clamp clarify clean clear close coalesce collapse collect combine compare compile
    complete compress compute configure connect consolidate convert copy correct count cover create cut deal debug
    declare decode decouple deduplicate default defer define delay delete delegate deprecate derive describe detach
    detect determine disable discard distinguish distribute divide do document download draw drop dump emit enable
    encode
    end enforce ensure enter estimate evict exclude execute exit expand expect explain export expose extend extract
    factor fail fall fetch fill filter find finish fix flag flatten flush fold follow forbid force format forward free
    freeze generate get give grant group grow guard halve handle harden hash hide hoist hold identify ignore implement
    import improve include increase index infer inherit initialize inject inline insert inspect install instrument
    integrate interrupt introduce invalidate isolate issue join keep label launch lay leave let lift limit link lint
    list load localize lock log look loop lower make map mark match measure merge migrate minimize mock model modify
    monitor mount move name narrow negate nest normalize notify number obey offer omit open optimize order organize
    overlap override pack pad parallelize parametrize parse pass patch permit pick pin place plan plant point poll pool
    port postpone predict prefer prefetch prepare preserve prevent print prioritize probe produce profile prohibit
    promote propagate protect prove provide prune publish pull purge push put query queue quote raise randomize rank
    read rebase rebuild recognize reconcile record recover redirect reduce refactor reflect refresh refuse regenerate
    register reject relax release reload rely remove rename render reopen reorder reorganize repair repeat rephrase
    replace replay report represent request require rerun reserve reset reshape resize resolve respect restart restore
    restrict restructure resume retain retry return reuse revert review revise reword rework rewrite roll rotate round
    route run sample save scale scan schedule scope seal search select send separate serialize serve set share shift
    ship shorten show shrink shut signal simplify simulate size skip sleep slice sort specialize specify speed split
    stabilize stack stage standardize start state stop store stream strengthen strip stub submit subtract summarize
    support suppress suspend swap switch synchronize sync tag take teach terminate test throttle tidy tighten time
    tolerate trace track transfer translate treat trigger trim truncate try tune turn type unblock undo unify unlink
    unpin unroll unset update upgrade upload use vary validate vectorize verify wait wake walk warm warn widen wire
    work wrap write yield
    """.split()
)
"""Verbs that may start a commit subject."""


@dataclass(frozen=True)
class Passage:
    """A defined name, or running text of one file.

    Attributes
    ----------
    line, last_line : int
    text : str
    is_name : bool
    """

    line: int
    last_line: int
    text: str
    is_name: bool = False


@dataclass(frozen=True)
class Hit:
    """One occurrence of a wording that the guide replaces."""

    line: int
    rule: str
    excerpt: str


@dataclass
class Report:
    """The measurement of one file.

    Attributes
    ----------
    line_count : int
        Non-blank lines.
    hits : list of Hit
    markers : list of (int, str)
        Line and reason of each marker; the reason may be empty.
    """

    line_count: int
    hits: list[Hit] = field(default_factory=list)
    markers: list[tuple[int, str]] = field(default_factory=list)

    @property
    def score(self) -> float:
        """The hits per 1,000 non-blank lines."""
        return 1000 * len(self.hits) / max(self.line_count, SHORT_FILE)

    @property
    def exceeds_limit(self) -> bool:
        """Whether the file may not be new."""
        return len(self.hits) >= MIN_HITS and self.score > FILE_LIMIT


_MARKER = re.compile(r"dialect: ignore(?P<file> file)?(?: \((?P<reason>[^()]*\w[^()]*)\))?\s*(?:\*/|-->|\"\"\")?\s*$")


def read_python(text: str) -> Iterator[Passage]:
    """Yield strings with a space, comments and defined names of Python source.

    Adjacent comment lines are one passage.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Passage(node.lineno, node.end_lineno or node.lineno, node.value)
        elif isinstance(node, ast.arg):
            yield Passage(node.lineno, node.lineno, node.arg, is_name=True)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield Passage(node.lineno, node.lineno, node.name, is_name=True)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield Passage(node.lineno, node.lineno, node.id if isinstance(node, ast.Name) else node.attr, is_name=True)
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        stands_alone = token.line.lstrip().startswith("#")
        if block and not (stands_alone and token.start[0] == block[-1].start[0] + 1):
            yield _comment(block)
            block = []
        if stands_alone:
            block.append(token)
        else:
            yield _comment([token])
    if block:
        yield _comment(block)


def _comment(tokens: Sequence[tokenize.TokenInfo]) -> Passage:
    text = "\n".join(token.string.lstrip("#").strip() for token in tokens)
    return Passage(tokens[0].start[0], tokens[-1].start[0], text)


_C_TEXT = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:[^\"\\\n]|\\.)* (?:[^\"\\\n]|\\.)*\"", re.DOTALL)


def read_c(text: str) -> Iterator[Passage]:
    """Yield comments, and strings with a space, of C source."""
    for match in _C_TEXT.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        content = re.sub(r"\n\s*\*? ?", "\n", match[0].strip('/* "'))
        yield Passage(line, line + match[0].count("\n"), content)


def read_prose(text: str) -> Iterator[Passage]:
    """Yield the paragraphs of a page, without code and link targets."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>|https?://\S+", "x", text)
    for match in re.finditer(r"(?:^(?!\s*$)[^\n]*\n?)+", text, re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        yield Passage(line, line + match[0].rstrip().count("\n"), match[0])


_C_SUFFIXES = (".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh")
READERS: Mapping[str, Callable[[str], Iterator[Passage]]] = {
    ".py": read_python,
    ".md": read_prose,
    ".rst": read_prose,
    **dict.fromkeys(_C_SUFFIXES, read_c),
}


def measure(text: str, suffix: str) -> Report:
    """Return the hits of a file with this text and this suffix."""
    source = text.splitlines()
    report = Report(sum(bool(line.strip()) for line in source))
    ignored: set[int] = set()
    ignores_file = False
    for number, line in enumerate(source, 1):
        if match := _MARKER.search(line):
            report.markers.append((number, match["reason"] or ""))
            ignored.add(number)
            ignores_file = ignores_file or bool(match["file"])
    if ignores_file:
        return report
    try:
        passages = list(READERS[suffix](text))
    except (SyntaxError, tokenize.TokenError):
        return report  # ruff reports these files
    for passage in passages:
        if passage.is_name:
            found = [Hit(passage.line, "vague name", passage.text)] if is_vague(passage.text) else []
        else:
            found = list(find_hits(passage))
        if passage.last_line not in ignored:
            report.hits += [hit for hit in found if hit.line not in ignored]
    return report


def is_vague(name: str) -> bool:
    """Return whether a defined name lacks a noun or a verb phrase."""
    return name.strip("_").lower() in VAGUE_NAMES


def find_hits(passage: Passage) -> Iterator[Hit]:
    """Yield the hits in running text. Single line breaks count as spaces."""
    text, starts = _join_lines(passage.text)
    for rule in RULES:
        for match in rule.pattern.finditer(text):
            line = min(passage.line + bisect_right(starts, match.start()) - 1, passage.last_line)
            excerpt = text[max(0, match.start() - 40) : match.end() + 40]
            yield Hit(line, rule.name, " ".join(excerpt.split()))


def _join_lines(text: str) -> tuple[str, list[int]]:
    """Return the text with its paragraphs on one line each, and the offset at which each original line starts."""
    joined, starts = "", [0]
    for number, line in enumerate(text.split("\n")):
        if number == 0:
            joined = line
            continue
        continues = bool(line.strip()) and not joined.endswith("\n")
        joined += " " if continues else "\n"
        starts.append(len(joined))
        joined += line.lstrip() if continues else line.rstrip()
    return joined, starts


@dataclass
class Baseline:
    """The content of tools/dialect.json.

    Attributes
    ----------
    rewritten : list of str
        Path prefixes of rooms that meet `ROOM_LIMIT`.
    files : dict
        Hits of each file above the limit for new files.
    """

    rewritten: list[str]
    files: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> Baseline:
        """Return the baseline that `dump` wrote."""
        content = json.loads(text)
        return cls(content["rewritten"], content["files"])

    def dump(self) -> str:
        """Return the text of the file."""
        content = {"rewritten": sorted(self.rewritten), "files": dict(sorted(self.files.items()))}
        return json.dumps(content, indent=1) + "\n"


class Repository:
    """The work tree, and the questions that only git can answer.

    Parameters
    ----------
    root : Path
        Top folder of the work tree.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def git(self, *arguments: str) -> str:
        """Return the output of a git command, or an empty string if it fails."""
        run = subprocess.run(["git", "-C", self.root, *arguments], capture_output=True, text=True, check=False)
        return run.stdout if run.returncode == 0 else ""

    def files(self) -> list[str]:
        """Return the paths of all files that can be measured, except those that git ignores."""
        listed = self.git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
        return sorted(path for path in set(listed) if _is_readable(path) and (self.root / path).is_file())

    def origins(self, revision: str) -> dict[str, str]:
        """Return the source of each file that was moved, copied or split off since a revision."""
        output = self.git("diff", "-M30%", "-C30%", "-l0", "--diff-filter=RC", "--name-status", "-z", revision)
        parts = output.split("\0")
        return {parts[k + 2]: parts[k + 1] for k in range(0, len(parts) - 2, 3)}

    def recorded_at(self) -> str:
        """Return the last commit that changed the baseline, or an empty string."""
        return self.git("log", "-1", "--format=%H", "--", BASELINE).strip()

    def deleted_at(self, path: str) -> str:
        """Return the last commit that deleted or moved a file, or an empty string."""
        return self.git("log", "-1", "--no-renames", "--diff-filter=D", "--format=%H", "--", path).strip()

    def base(self) -> str:
        """Return the commit where the branch left main; on main, the commit before the last one."""
        head = self.git("rev-parse", "HEAD").strip()
        for branch in ("origin/main", "main"):
            if base := self.git("merge-base", "HEAD", branch).strip():
                return base if base != head else self.git("rev-parse", "-q", "--verify", "HEAD~1").strip()
        return head

    def text_at(self, revision: str, path: str) -> str:
        """Return the text of a file at a revision, or an empty string."""
        return self.git("show", f"{revision}:{path}")


def _is_readable(path: str) -> bool:
    return Path(path).suffix in READERS


def _measure_file(path: Path) -> Report:
    return measure(path.read_text(encoding="utf-8", errors="replace"), path.suffix)


def measure_files(root: Path, paths: Sequence[str]) -> dict[str, Report]:
    """Return the report of each file. Many files are read by several processes."""
    absolute = [root / path for path in paths]
    if len(paths) < 50:
        return dict(zip(paths, map(_measure_file, absolute), strict=True))
    with ProcessPoolExecutor() as pool:
        return dict(zip(paths, pool.map(_measure_file, absolute, chunksize=16), strict=True))


def room_of(path: str) -> str:
    """Return the room of a file: its folder in the package, in the tests or in the lab, or its top folder."""
    parts = Path(path).parts[:-1]
    depth = 3 if parts[:1] == ("src",) else 2 if parts[:1] in (("tests",), ("lab",)) else 1
    return "/".join(parts[:depth]) or "."


def find_sources(
    missing: Iterable[str], recorded: Mapping[str, int], present: Iterable[str], origins: Mapping[str, str]
) -> dict[str, str]:
    """Return for files without a recorded count the recorded file that they were moved or split from.

    Parameters
    ----------
    missing : iterable of str
        Files without a recorded count.
    recorded : mapping
        Counts of the baseline.
    present : iterable of str
        All files of the work tree.
    origins : mapping
        New path -> old path, from git. A file without an entry is matched by its base name, if exactly one recorded
        file of that name has vanished.
    """
    vanished: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(set(recorded) - set(present) - set(origins.values())):
        vanished[Path(path).name].append(path)
    sources = {}
    for path in missing:
        namesakes = vanished[Path(path).name]
        if origins.get(path) in recorded:
            sources[path] = origins[path]
        elif len(namesakes) == 1:
            sources[path] = namesakes[0]
    return sources


def excess(hits: Mapping[str, int], recorded: Mapping[str, int], sources: Mapping[str, str]) -> dict[str, int | None]:
    """Return the files that exceed the baseline, with their permitted number of hits; None for a new file.

    Files that were split off share the count of their source.

    Parameters
    ----------
    hits : mapping
        Hits of the files above the limit for new files, and of files in the baseline.
    recorded : mapping
        Counts of the baseline.
    sources : mapping
        Files without a recorded count -> recorded file from which they were moved or split.
    """
    shared: defaultdict[str, int] = defaultdict(int)
    for path, count in hits.items():
        shared[path if path in recorded else sources.get(path, path)] += count
    found: dict[str, int | None] = {}
    for path in hits:
        source = path if path in recorded else sources.get(path)
        if source is None:
            found[path] = None
        elif shared[source] > recorded[source] and (path not in recorded or hits[path] > recorded[path]):
            found[path] = recorded[source]
    return found


def raised_counts(old: Baseline, new: Baseline, origins: Mapping[str, str]) -> list[str]:
    """Return a message for each count or room in which the new baseline is weaker than the old baseline."""
    totals: defaultdict[str, int] = defaultdict(int)
    unknown = []
    for path, count in new.files.items():
        source = path if path in old.files else origins.get(path, path)
        totals[source] += count
        if source not in old.files:
            unknown.append(path)
    messages = [f"{BASELINE}: {path} was added; reword the file instead" for path in unknown]
    messages += [
        f"{BASELINE}: the count of {path} was raised from {old.files[path]} to {total}; reword the file instead"
        for path, total in sorted(totals.items())
        if path in old.files and total > old.files[path]
    ]
    messages += [
        f"{BASELINE}: {room} was removed from the rewritten rooms"
        for room in old.rewritten
        if room not in new.rewritten
    ]
    return messages


class Gauge:
    """The comparison of a repository with its baseline.

    Parameters
    ----------
    root : Path
        Top folder of the work tree.
    paths : sequence of str, optional
        Files to check, relative to `root`; all by default.
    """

    def __init__(self, root: Path, paths: Sequence[str] = ()) -> None:
        self.repository = Repository(root)
        self.present = self.repository.files()
        chosen = [path for path in self.present if not paths or path in set(paths)]
        self.is_complete = not paths
        self.reports = measure_files(root, chosen)
        self.baseline = Baseline.parse((root / BASELINE).read_text())
        recorded = self.baseline.files
        self.hits = {
            path: len(report.hits) for path, report in self.reports.items() if report.exceeds_limit or path in recorded
        }
        missing = [path for path in self.hits if path not in recorded]
        origins: dict[str, str] = {}
        for revision in self._revisions() if missing else ():
            origins |= {path: old for path, old in self.repository.origins(revision).items() if old in recorded}
        self.sources = find_sources(missing, recorded, self.present, origins)

    def _revisions(self) -> list[str]:
        """Return the revision of the baseline, and those before a recorded file was moved."""
        vanished = sorted(set(self.baseline.files) - set(self.present))
        deletions = {self.repository.deleted_at(path) for path in vanished}
        revisions = [self.repository.recorded_at(), *(f"{commit}~1" for commit in sorted(deletions) if commit)]
        return [revision for revision in revisions if revision]

    def violations(self) -> list[str]:
        """Return a message for each violation of a limit."""
        messages = []
        for path, permitted in excess(self.hits, self.baseline.files, self.sources).items():
            report = self.reports[path]
            if permitted is None:
                text = f"scores {report.score:.1f}; the limit is {FILE_LIMIT:.0f} hits per 1,000 lines"
            else:
                text = f"more than the {permitted} that {BASELINE} records for it"
            messages.append(f"{path}: {len(report.hits)} hits in {report.line_count} lines, {text}")
            messages += [f"  {path}:{hit.line}: {hit.rule}: {hit.excerpt}" for hit in self._new_hits(path)[:10]]
        for room in self.baseline.rewritten if self.is_complete else ():
            inside = [report for path, report in self.reports.items() if path.startswith(f"{room}/")]
            hits, line_count = sum(len(report.hits) for report in inside), sum(report.line_count for report in inside)
            if hits >= MIN_HITS and 1000 * hits > ROOM_LIMIT * line_count:
                score = 1000 * hits / max(line_count, 1)
                messages.append(f"{room}: scores {score:.1f}; the limit of a rewritten room is {ROOM_LIMIT:.0f}")
        return messages + self._marker_violations() + self._ratchet_violations()

    def _new_hits(self, path: str) -> list[Hit]:
        """Return the hits that are newer than the recorded count, or all hits if every one is older."""
        hits = self.reports[path].hits
        source = path if path in self.baseline.files else self.sources.get(path)
        if source is None:
            return hits
        text = self.repository.text_at(self.repository.recorded_at(), source)
        earlier = Counter((hit.rule, hit.excerpt) for hit in measure(text, Path(source).suffix).hits)
        fresh = []
        for hit in hits:
            earlier[hit.rule, hit.excerpt] -= 1
            if earlier[hit.rule, hit.excerpt] < 0:
                fresh.append(hit)
        return fresh or hits

    def _marker_violations(self) -> list[str]:
        messages = [
            f"{path}:{line}: dialect: ignore needs a reason in parentheses"
            for path, report in self.reports.items()
            for line, reason in report.markers
            if not reason
        ]
        total = sum(len(report.markers) for report in self.reports.values())
        if total > MAX_MARKERS:
            messages.append(f"{total} lines hold `dialect: ignore`; the limit of the repository is {MAX_MARKERS}")
        return messages

    def _ratchet_violations(self) -> list[str]:
        base = self.repository.base()
        text = self.repository.text_at(base, BASELINE) if base else ""
        if not text:
            return []
        old = Baseline.parse(text)
        origins = self.repository.origins(base) if old.files != self.baseline.files else {}
        added = [path for path in self.baseline.files if path not in old.files]
        return raised_counts(old, self.baseline, find_sources(added, old.files, self.present, origins))

    def updated_baseline(self) -> Baseline:
        """Return the baseline with the counts of today, without files that meet the limit for new files."""
        refused = excess(self.hits, self.baseline.files, self.sources)
        files = {
            path: self.baseline.files.get(path, count) if path in refused else count
            for path, count in self.hits.items()
            if self.reports[path].exceeds_limit and (path not in refused or path in self.baseline.files)
        }
        return Baseline(self.baseline.rewritten, files)


def subject_problems(subject: str) -> list[str]:
    """Return the problems of a commit subject."""
    text = re.sub(r"^[\w/-]+: ", "", subject)
    first = text.split(" ")[0]
    problems = []
    if len(subject) > SUBJECT_LENGTH:
        problems.append(f"has {len(subject)} characters; the limit is {SUBJECT_LENGTH}")
    if first.lower() not in VERBS:
        problems.append(f"must start with an imperative, got {first!r}")
    elif not first[0].isupper():
        problems.append(f"must start with a capital, got {first!r}")
    if subject.endswith("."):
        problems.append("must not end with a period")
    return problems


def message_problems(message: str) -> list[str]:
    """Return the problems of a commit message; lines that start with ``#`` are comments."""
    written = [line for line in message.splitlines() if not line.startswith("#")]
    subject = written[0] if written else ""
    problems = subject_problems(subject)
    if len(written) > 1 and written[1].strip():
        problems.append("must be followed by a blank line")
    return [f"commit subject {subject!r} {problem}" for problem in problems]


def commit_problems(repository: Repository, revisions: str) -> list[str]:
    """Return the problems of the subjects of commits in a range, without merges."""
    log = repository.git("log", "--no-merges", "--format=%h %s", revisions)
    messages = []
    for line in log.splitlines():
        sha, _, subject = line.partition(" ")
        messages += [f"{sha} {subject!r} {problem}" for problem in subject_problems(subject)]
    return messages


def print_scores(reports: Mapping[str, Report], count: int) -> None:
    """Print the score of each room, the hits of each rule, and the files with the highest scores."""
    rooms: defaultdict[str, list[Report]] = defaultdict(list)
    for path, report in reports.items():
        rooms[room_of(path)].append(report)
    rows = []
    for room, members in [*rooms.items(), ("all", list(reports.values()))]:
        hits, line_count = sum(len(report.hits) for report in members), sum(report.line_count for report in members)
        rows.append((1000 * hits / max(line_count, 1), hits, line_count, room))
    for score, hits, line_count, room in sorted(rows, reverse=True):
        print(f"{score:7.1f}  {hits:6} hits in {line_count:7} lines  {room}")
    rules = Counter(hit.rule for report in reports.values() for hit in report.hits)
    print(", ".join(f"{rule} {number}" for rule, number in rules.most_common()))
    for path in sorted(reports, key=lambda path: -reports[path].score)[:count]:
        for hit in reports[path].hits[: 1 if len(reports) > 1 else None]:
            print(f"{reports[path].score:7.1f}  {path}:{hit.line}: {hit.rule}: {hit.excerpt}")


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="files and folders; default: the repository"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is violated")
    parser.add_argument("--update", action="store_true", help="lower the recorded counts, follow moved files")
    parser.add_argument("--commits", metavar="REVISIONS", help="check the subjects of these commits")
    parser.add_argument("--message", type=Path, metavar="FILE", help="check the commit message in a file")
    parser.add_argument("--files", type=int, default=20, metavar="N", help="number of files to list (default: 20)")
    return parser.parse_args(arguments)


def _select(repository: Repository, paths: Sequence[Path]) -> list[str]:
    prefixes = [path.resolve().relative_to(repository.root).as_posix() for path in paths]
    return [
        path
        for path in repository.files()
        if any(prefix in (".", path) or path.startswith(f"{prefix}/") for prefix in prefixes)
    ]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return 1 if a check fails."""
    options = _parse_arguments(arguments)
    repository = Repository(root)
    problems: list[str] = []
    if options.message:
        problems += message_problems(options.message.read_text(encoding="utf-8"))
    if options.commits:
        problems += commit_problems(repository, options.commits)
    selected = _select(repository, options.paths)
    if options.update or (options.check and (selected or not options.paths)):
        gauge = Gauge(root, [] if options.update else selected)
        if options.update:
            (root / BASELINE).write_text(gauge.updated_baseline().dump())
        problems += gauge.violations()
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print("the rules are in docs/style-guide.md", file=sys.stderr)
    if not (options.check or options.update or options.commits or options.message):
        print_scores(measure_files(root, selected if options.paths else repository.files()), options.files)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
