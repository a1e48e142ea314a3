"""House rules as code: what no linter says, each rule with a planted violation that it must find.

A rule is a function from a tree (path to text) to complaints. The first test runs every rule on the real tree; the
second runs each on a small sound tree with one thing wrong, because a check that cannot fail checks nothing.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.core.errors import KINDS
from forebay.core.metrics import METRICS

ROOT = Path(__file__).parents[1]
SOURCE = "src/forebay/"
LINE_MAX, FUNCTION_LINES_MAX, FILE_LINES_MAX, CORE_FILE_LINES_MAX = 120, 70, 800, 500
FOLDER_MODULES_MAX = 25
# What the design has a word for; more may be added to the glossary.
WORDS = (
    *("backend", "block", "bucket", "check", "clean", "dirty", "engine", "epoch", "flight", "flush", "front", "home"),
    *("job", "key", "lease", "map", "member", "mount", "node", "object", "pin", "scrub", "shard", "stripe", "unit"),
    *("verdict", "version", "volume"),
)
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".html", ".css", ".js", ".json", ""}

Tree = dict[str, str]
Rule = Callable[[Tree], Iterator[str]]
RULES: list[Rule] = []


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


def python(tree: Tree, *prefixes: str) -> Iterator[tuple[str, str]]:
    for path, text in sorted(tree.items()):
        if path.endswith(".py") and (not prefixes or path.startswith(prefixes)):
            yield path, text


@functools.cache
def syntax(text: str) -> list[ast.AST]:
    """Every node of a module's syntax but loads and stores, the module first: several rules look at it."""
    gc.disable()  # of millions of nodes none is garbage
    try:
        nodes: list[ast.AST] = [ast.parse(text)]
        for node in nodes:  # which grow meanwhile; `ast.walk` takes twice as long
            for value in vars(node).values():
                if isinstance(value, list):
                    nodes += [each for each in value if isinstance(each, ast.AST)]
                elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                    nodes.append(value)
        return nodes
    finally:
        gc.enable()


def docstring(text: str) -> str:
    module = syntax(text)[0]
    assert isinstance(module, ast.Module)
    return ast.get_docstring(module) or ""


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """No other test has all that syntax in its memory."""
    yield
    syntax.cache_clear()


# --- size ------------------------------------------------------------------------------------------------------------
@rule
def files_are_short(tree: Tree) -> Iterator[str]:
    for path, text in python(tree):
        most = CORE_FILE_LINES_MAX if path.startswith(f"{SOURCE}core/") else FILE_LINES_MAX
        lines = text.count("\n")
        if lines > most:
            yield f"{path}: {lines} lines, at most {most}: split it along a noun"


@rule
def functions_are_short(tree: Tree) -> Iterator[str]:
    for path, text in python(tree):
        for node in syntax(text):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


@rule
def lines_are_short(tree: Tree) -> Iterator[str]:
    for path, text in tree.items():
        if path.endswith((".py", "Makefile")) or path.startswith(("scripts/", ".ci/")):
            for number, line in enumerate(text.splitlines(), 1):
                line = re.sub(r"\s+# (type: ignore|noqa|pragma).*", "", line)  # a tool's mark is not text
                if len(line) > LINE_MAX:
                    yield f"{path}:{number}: {len(line)} columns, at most {LINE_MAX}"


@rule
def folders_are_small(tree: Tree) -> Iterator[str]:
    modules: dict[str, int] = {}
    for path, _ in python(tree, SOURCE, "bench/", "demo/"):
        folder = str(Path(path).parent)
        modules[folder] = modules.get(folder, 0) + (Path(path).name != "__init__.py")
    for folder, count in modules.items():
        if count > FOLDER_MODULES_MAX and folder != f"{SOURCE}cli":  # there a file is a verb
            yield f"{folder}: {count} modules, at most {FOLDER_MODULES_MAX}: make rooms"


# --- words -----------------------------------------------------------------------------------------------------------
@rule
def core_modules_open_with_their_theory(tree: Tree) -> Iterator[str]:
    # Where a module has no state, there is nothing to keep true; then the reason stands here.
    stateless = {"limits": "its relations are asserted when it is imported", "types": "each value checks itself"}
    for path, text in python(tree, f"{SOURCE}core/"):
        name = Path(path).stem
        header = docstring(text)
        if name == "__init__":
            continue
        if "Theory." not in header:
            yield f"{path}: the header has no 'Theory.': say how it works and what was rejected (STYLE.md)"
        if not re.search(r"^Invariants?\b", header, re.MULTILINE) and name not in stateless:
            yield f"{path}: the header has no 'Invariants.': say what always holds (STYLE.md)"


@rule
def modules_say_what_they_are_for(tree: Tree) -> Iterator[str]:
    for path, text in python(tree):
        if text.strip() and not docstring(text):
            yield f"{path}: no docstring at its head"


@rule
def nothing_is_left_for_later(tree: Tree) -> Iterator[str]:
    later = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
    for path, text in tree.items():
        for number, line in enumerate(text.splitlines(), 1):
            if later.search(line):
                yield f"{path}:{number}: do it now, or put it into an issue"


@rule
def modules_are_domain_nouns(tree: Tree) -> Iterator[str]:
    for path, _ in python(tree, SOURCE, "bench/", "demo/"):
        if set(Path(path).with_suffix("").parts) & {"utils", "util", "common", "manager", "helpers", "misc", "base"}:
            yield f"{path}: a name for a drawer: name what is in it"


@rule
def the_glossary_is_complete_and_kept(tree: Tree) -> Iterator[str]:
    text = tree.get("docs/glossary.md", "")
    entries = re.findall(r"^\| \*\*([^*]+)\*\* \| .+? \|(.*)\|$", text, re.MULTILINE)
    words = [word.strip() for word, _ in entries]
    for word in WORDS:
        if word not in words:
            yield f"docs/glossary.md: no line for '{word}'"
    if words != sorted(words):
        yield "docs/glossary.md: the words are not in alphabetical order"
    for word, not_this in entries:
        for avoided in re.findall(r"`([a-z_]+)`", not_this):
            for path, source in python(tree, SOURCE):
                if re.search(rf"^\s*(class|def|async def) \w*{avoided}\w*\b", source, re.MULTILINE | re.IGNORECASE):
                    yield f"{path}: a name holds '{avoided}', where the glossary says '{word.strip()}'"


# --- structure -------------------------------------------------------------------------------------------------------
@rule
def no_module_is_dead(tree: Tree) -> Iterator[str]:
    modules = {_module(path): path for path, _ in python(tree, SOURCE) if "__init__" not in path}
    entries = set(re.findall(r'"(forebay[\w.]*)', tree.get("pyproject.toml", "")))
    used: set[str] = set()
    for path, text in python(tree, SOURCE):
        used |= _mentions(path, text) - {_module(path)}
    for module, path in modules.items():
        if module not in used | entries and not module.endswith("__main__"):
            yield f"{path}: nothing imports it: use it or remove it"


def _module(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _mentions(path: str, text: str) -> set[str]:
    """Modules that a file imports, or names in a string (lazy imports, `python -m`, lint contracts)."""
    found: set[str] = set()
    for node in syntax(text):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = _module(path).split(".")
            if not path.endswith("__init__.py"):
                package = package[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else (node.module or "")
            found |= {base, *(f"{base}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("forebay."):
            found.add(node.value.partition(":")[0])
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            prefix = str(node.values[0].value)  # f"forebay.cli.{verb}": the verbs are strings of the same file
            if prefix.startswith("forebay.") and prefix.endswith("."):
                found |= {prefix + word for word in _strings(text)}
    return found


def _strings(text: str) -> set[str]:
    return {node.value for node in syntax(text) if isinstance(node, ast.Constant) and _is_word(node.value)}


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


# --- documents -------------------------------------------------------------------------------------------------------
@rule
def every_metric_is_documented(tree: Tree) -> Iterator[str]:
    named = set(re.findall(r"`(forebay_\w+)", tree.get("docs/metrics.md", "")))
    for name in sorted(set(METRICS) - named):
        yield f"docs/metrics.md: {name} is missing"
    for name in sorted(named - set(METRICS)):
        if re.sub(r"_(bucket|sum|count)$", "", name) not in METRICS:
            yield f"docs/metrics.md: {name} does not exist (core/metrics.py)"


@rule
def every_error_kind_is_documented(tree: Tree) -> Iterator[str]:
    docs = "\n".join(text for path, text in tree.items() if path.startswith("docs/") and path.endswith(".md"))
    for kind in KINDS:
        if f"`{kind}`" not in docs:
            yield f"docs: the error kind `{kind}` is explained nowhere"


@rule
def every_dependency_has_its_reason(tree: Tree) -> Iterator[str]:
    project = tomllib.loads(tree.get("pyproject.toml", "")).get("project", {})
    wanted = list(project.get("dependencies", []))
    for extra in project.get("optional-dependencies", {}).values():
        wanted += extra
    needed = {match[0] for text in wanted if (match := re.match(r"[A-Za-z0-9_.-]+", text))}
    listed = set(re.findall(r"^\| `([A-Za-z0-9_.-]+)` \|", tree.get("docs/dependencies.md", ""), re.MULTILINE))
    for name in sorted(needed - listed):
        yield f"docs/dependencies.md: no line for {name}, which pyproject.toml asks for"
    for name in sorted(listed - needed):
        yield f"docs/dependencies.md: {name} is listed, but pyproject.toml does not ask for it"


@rule
def every_dependency_is_used(tree: Tree) -> Iterator[str]:
    project = tomllib.loads(tree.get("pyproject.toml", "")).get("project", {})
    imported: set[str] = set()
    for path, text in python(tree, SOURCE):
        imported |= {name.partition(".")[0] for name in _mentions(path, text)}
    for text in project.get("dependencies", []):
        if _package(text) not in imported:
            yield f"pyproject.toml: nothing imports {_package(text)}: what is not used is a burden to every user"


@rule
def imports_are_declared(tree: Tree) -> Iterator[str]:
    project = tomllib.loads(tree.get("pyproject.toml", "")).get("project", {})
    runtime = {_package(text) for text in project.get("dependencies", [])}
    project_extras = project.get("optional-dependencies", {})
    extras = {_package(text) for extra in project_extras.values() for text in extra}
    # Extras that are not named here are for the room of their name.
    places = {"torch": ("torch/", "offload/"), "plan": ("offload/", "checkpoint/pictures.py")}
    rooms = [
        (f"{SOURCE}{place}", {_package(text) for text in texts})
        for extra, texts in project_extras.items()
        for place in places.get(extra, (f"{extra}/",))
    ]
    here = {"forebay", "bench", "demo", "tests", *sys.stdlib_module_names}
    for path, text in python(tree):
        own = {name for room, names in rooms if path.startswith(room) for name in names}  # src/forebay/torch/
        others = extras | {"botocore", "PIL"}  # boto3 brings botocore, and pillow is imported as PIL
        allowed = here | runtime | (own if path.startswith(SOURCE) else others)
        for name in sorted({imported.partition(".")[0] for imported in _imports(text)} - allowed):
            yield f"{path}: imports {name}, which pyproject.toml does not ask for there"


def _package(text: str) -> str:
    name = re.split(r"[^A-Za-z0-9_.-]", text)[0].replace("-", "_")
    return {"pyjwt": "jwt"}.get(name, name)  # what it is imported as


def _imports(text: str) -> set[str]:
    """Modules imported from elsewhere by an import statement."""
    found: set[str] = set()
    for node in syntax(text):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    return found


@rule
def the_readme_shows_the_way(tree: Tree) -> Iterator[str]:
    text = tree.get("README.md", "")
    for command in ("make demo", "make test", "forebay up", "AWS_ENDPOINT_URL"):
        if command not in text:
            yield f"README.md: does not show '{command}'"


@rule
def links_lead_somewhere(tree: Tree) -> Iterator[str]:
    folders = {str(parent) for path in tree for parent in Path(path).parents}
    for path, text in tree.items():
        if not path.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            found = (ROOT / Path(path).parent / target).resolve()
            name = str(found.relative_to(ROOT)) if found.is_relative_to(ROOT) else str(found)
            if name not in tree and name not in folders:
                yield f"{path}: the link {target} leads nowhere"


@rule
def design_notes_have_a_number_and_a_status(tree: Tree) -> Iterator[str]:
    numbers: dict[str, str] = {}
    for path, text in sorted(tree.items()):
        name = path.removeprefix("docs/design/")
        if path == name or not path.endswith(".md") or name in ("README.md", "template.md"):
            continue
        match = re.fullmatch(r"(\d{4})-[a-z0-9-]+\.md", name)
        if not match:
            yield f"{path}: a design note is called NNNN-title.md"
        elif match[1] in numbers:
            yield f"{path}: the number {match[1]} belongs to {numbers[match[1]]}"
        else:
            numbers[match[1]] = path
        if not re.search(r"^Status: (draft|accepted|superseded|rejected)", text, re.MULTILINE):
            yield f"{path}: no line 'Status: draft|accepted|superseded|rejected'"


@rule
def fragments_are_well_formed(tree: Tree) -> Iterator[str]:
    for path, text in tree.items():
        if not path.startswith("changes/") or path == "changes/README.md":
            continue
        if not re.fullmatch(r"changes/[a-z0-9-]+\.(added|changed|fixed|removed|internal)\.md", path):
            yield f"{path}: a fragment is called <slug>.<added|changed|fixed|removed|internal>.md"
        said = text.strip()
        if not said or not said.endswith(".") or "\n\n" in said or len(said) > 700 or said.startswith(("-", "#")):
            yield f"{path}: one paragraph of sentences, at most 700 characters, to the user, in the present tense"


@rule
def nothing_belongs_to_one_machine(tree: Tree) -> Iterator[str]:
    homes = re.compile(
        "(?<![\\w.-])(" + "|".join(["/ro" + "ot/", "/ho" + "me/\\w", "/wo" + "rk/", "/Us" + "ers/"]) + ")"
    )
    hosts = re.compile("|".join(["pyth" + "onhosted", "py" + "pi\\.org", "npm" + "js\\.", "deb\\." + "debian"]))
    for path, text in tree.items():
        for number, line in enumerate(text.splitlines(), 1):
            if homes.search(line):
                yield f"{path}:{number}: a path of one machine"
            if hosts.search(line):
                yield f"{path}:{number}: a registry's host: the clients know where theirs is"


@rule
def nothing_is_kept_in_a_home(tree: Tree) -> Iterator[str]:
    """What lies in a user's home may be of another version: it hid a red suite once."""
    homes = re.compile("|".join(["Path\\.ho" + "me\\(", "expand" + "user", "\\.ca" + "che/"]))
    for path, text in tree.items():
        if path.startswith(("scripts/", "tests/", "demo/", "bench/")):
            for number, line in enumerate(text.splitlines(), 1):
                if homes.search(line):
                    yield f"{path}:{number}: kept in a home: keep it in the checkout, at its version"


@rule
def waits_of_tests_end_late(tree: Tree) -> Iterator[str]:
    """A wait that ends after some seconds fails on a busy machine. One that is to expire takes less than a second."""
    waits = {"timeout", "wait", "join", "result", "settimeout", "wait_for", "communicate", "create_connection"}
    for path, text in python(tree, "tests/"):
        for node in syntax(text):
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Attribute)
                or node.func.attr not in waits
            ):
                continue
            ends = [*node.args, *(word.value for word in node.keywords if word.arg in ("timeout", "timeout_s"))]
            for end in ends:
                if isinstance(end, ast.Constant) and isinstance(end.value, int | float) and 1 <= end.value < 30:
                    yield f"{path}:{node.lineno}: ends after {end.value} s: take PATIENCE_S of tests/patience.py"


# --- the tests of the rules ------------------------------------------------------------------------------------------
@functools.cache
def real_tree() -> Tree:
    """Files that are tracked or would be: text, LICENSE aside; of pictures the names, for what leads there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    paths = [name for name in listed if name and name != "LICENSE" and Path(name).suffix in TEXT_SUFFIXES]
    pictures = [name for name in listed if name.endswith(".png")]
    return {name: (ROOT / name).read_text("utf-8") for name in paths if (ROOT / name).is_file()} | dict.fromkeys(
        pictures, ""
    )


@pytest.mark.parametrize("check", RULES, ids=lambda check: check.__name__)
def test_the_tree_keeps_the_rule(check: Rule):
    complaints = list(check(real_tree()))
    assert not complaints, "\n" + "\n".join(complaints)


def sound_tree() -> Tree:
    """The least that breaks no rule about what must be there, and the most that a folder may hold."""
    return {
        **{f"demo/scene{number}.py": '"""A scene."""\n' for number in range(FOLDER_MODULES_MAX)},
        "README.md": "`make demo` `make test` `forebay up` `AWS_ENDPOINT_URL`",
        "pyproject.toml": '[project]\ndependencies = ["lmdb>=1"]\nscripts = {forebay = "forebay.cli.main:run"}\n',
        "docs/dependencies.md": "| `lmdb` | the index |\n",
        "docs/metrics.md": " ".join(f"`{name}`" for name in METRICS),
        "docs/errors.md": " ".join(f"`{kind}`" for kind in KINDS),
        "docs/glossary.md": "".join(f"| **{word}** | a meaning | |\n" for word in WORDS),
        "docs/design/0001-a-note.md": "Status: accepted\n",
        "changes/first-read.added.md": "Reads are served.",
        f"{SOURCE}cli/main.py": '"""The command line."""\nimport lmdb\nfrom forebay.core.machines import flight\n',
        f"{SOURCE}core/machines/flight.py": '"""Cold reads.\n\nTheory. One fetch.\n\nInvariants. (1) One.\n"""\n',
    }


def long_function() -> str:
    return '"""Long."""\n\ndef long():\n' + "    pass\n" * FUNCTION_LINES_MAX


PLANTED: dict[str, list[tuple[str, str | None]]] = {
    "files_are_short": [
        (f"{SOURCE}core/long.py", '"""Theory."""\n' + "a = 1\n" * 500),
        (f"{SOURCE}node/long.py", '"""Long."""\n' + "a = 1\n" * 800),
    ],
    "functions_are_short": [("tests/test_x.py", long_function())],
    "folders_are_small": [("demo/one_more.py", '"""One more."""\n')],
    "lines_are_short": [("Makefile", "x" * 121), ("scripts/x", "y" * 121)],
    "core_modules_open_with_their_theory": [
        (f"{SOURCE}core/x.py", '"""What it does. Invariants. (1) None."""\n'),
        (f"{SOURCE}core/y.py", '"""Theory. It does."""\n'),
        (f"{SOURCE}core/z.py", "a = 1\n"),
    ],
    "modules_say_what_they_are_for": [("tests/test_x.py", "import os\n")],
    "nothing_is_left_for_later": [("docs/x.md", "TO" + "DO: write this"), ("Makefile", "# FIX" + "ME")],
    "modules_are_domain_nouns": [(f"{SOURCE}node/utils.py", ""), (f"{SOURCE}common/x.py", "")],
    "the_glossary_is_complete_and_kept": [
        ("docs/glossary.md", "| **block** | a piece | |\n"),
        (f"{SOURCE}node/x.py", "class NodeSmap:\n    pass\n"),
    ],
    "no_module_is_dead": [(f"{SOURCE}core/orphan.py", '"""Orphan."""\n')],
    "every_metric_is_documented": [("docs/metrics.md", ""), ("docs/metrics.md", "`forebay_invented_total`")],
    "every_error_kind_is_documented": [("docs/errors.md", "`NotFound`")],
    "every_dependency_has_its_reason": [
        ("docs/dependencies.md", ""),
        ("docs/dependencies.md", "| `lmdb` | the index |\n| `left-pad` | none |\n"),
    ],
    "every_dependency_is_used": [(f"{SOURCE}cli/main.py", '"""No index."""\n')],
    "imports_are_declared": [
        ("tests/test_x.py", '"""X."""\nimport left_pad\n'),
        (f"{SOURCE}node/x.py", '"""X."""\ndef lazy():\n    from numpy import array\n'),
    ],
    "the_readme_shows_the_way": [("README.md", "Hello.")],
    "links_lead_somewhere": [("docs/x.md", "[see](gone.md)"), ("README.md", "[see](docs/gone/)")],
    "design_notes_have_a_number_and_a_status": [
        ("docs/design/0001-other.md", "Status: accepted"),
        ("docs/design/idea.md", "Status: draft"),
        ("docs/design/0002-x.md", "no status"),
    ],
    "fragments_are_well_formed": [
        ("changes/x.md", "Something."),
        ("changes/x.added.md", ""),
        ("changes/x.added.md", "no full stop"),
        ("changes/x.fixed.md", "- a list."),
    ],
    "nothing_belongs_to_one_machine": [
        ("docs/x.md", "see /ro" + "ot/x"),
        ("Makefile", "cd /wo" + "rk/main"),
        ("scripts/setup", "https://py" + "pi.org/simple"),
    ],
    "nothing_is_kept_in_a_home": [
        ("scripts/setup", "cd ~/.ca" + "che/x"),
        ("tests/test_x.py", '"""X."""\nplace = Path.ho' + 'me() / "x"\n'),
    ],
    "waits_of_tests_end_late": [
        ("tests/test_x.py", '"""X."""\nasync def test():\n    async with asyncio.timeout(5):\n        pass\n'),
        ("tests/test_x.py", '"""X."""\nprocess.communicate(timeout=20)\n'),
    ],
}


@pytest.mark.parametrize("check", RULES, ids=lambda check: check.__name__)
def test_the_rule_finds_what_is_planted(check: Rule):
    sound = sound_tree()
    if check.__name__ == "the_glossary_is_complete_and_kept":
        sound["docs/glossary.md"] = sound["docs/glossary.md"].replace(
            "| **map** | a meaning | |", "| **map** | a meaning | `smap` |"
        )
    assert list(check(sound)) == []
    for path, text in PLANTED[check.__name__]:
        complaints = list(check({**sound, path: text or ""}))
        assert complaints, f"{check.__name__} does not notice {path}: {text!r}"
