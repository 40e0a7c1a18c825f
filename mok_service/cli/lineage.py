"""The verb lineage: what a run came from and what came from it, as JSON, DOT, Mermaid or text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, RunArgument, Url, reader, run_id

Format = Literal["text", "json", "dot", "mermaid"]
_SHAPES: Final = {"run": "box", "job": "note", "data": "cylinder", "code": "component", "weights": "hexagon",
                  "verification": "ellipse"}
_SQUARE: Final = ("run", "job")  # in Mermaid; the others are round


def add_to(app: typer.Typer) -> None:
    """Add this verb to the command."""
    app.command(epilog="Example: mok lineage latest --format mermaid")(lineage)


def lineage(
    run: RunArgument,
    form: Annotated[Format, typer.Option("--format", metavar="text|json|dot|mermaid", help="How to print the graph.")] = "text",
    depth: Annotated[int, typer.Option(min=0, max=20, help="How many runs away from this one.")] = 5,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Show what a run came from, and what came from it.

    Its original, reproductions and audits, the runs whose weights it started from and those that started from its own; with
    their jobs, data, code and verdicts. Edges lead to what a node depends on.
    """
    from mok_service import render

    with reader(url, data_dir) as source:
        graph = source.lineage(run_id(source, run), depth)
    if as_json or form == "json":
        render.print_json(graph)
        return
    lines = {"text": text_lines, "dot": dot_lines, "mermaid": mermaid_lines}[form](graph)
    print("\n".join(lines))


def text_lines(graph: Mapping[str, Any]) -> Iterator[str]:
    """Every run with what it depends on, the one that was asked for marked."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    for node in graph["nodes"]:
        if node["kind"] != "run":
            continue
        facts = node["facts"]
        marked = "*" if node["id"] == graph["run"] else " "
        verdict = "" if facts["verdict"] is None else f"  {facts['verdict']}"
        yield f"{marked} {node['id']}  {facts['run_kind']}  {facts['status']}{verdict}  {_printable(node['label'])}"
        for edge in graph["edges"]:
            if edge["source"] == node["id"]:
                target = nodes[edge["target"]]
                name = "" if target["kind"] in ("run", "job", "data") else f"  {_printable(target['label'])}"
                yield f"    {edge['relation']} {edge['target']}{_at(edge)}{name}"
            elif edge["target"] == node["id"] and edge["relation"] == "verifies":
                made = nodes[edge["source"]]
                yield f"    {made['facts']['level']}: {made['label']}  {made['id']}"
    if graph["truncated"]:
        yield "  and more: see --depth"


def dot_lines(graph: Mapping[str, Any]) -> Iterator[str]:
    """The graph for Graphviz."""
    yield "digraph lineage {"
    yield "  rankdir=RL;"
    for node in graph["nodes"]:
        bold = ", style=bold" if node["id"] == graph["run"] else ""
        label = "\\n".join(_quoted(line) for line in _label(node))
        yield f'  "{node["id"]}" [shape={_SHAPES[node["kind"]]}, label="{label}"{bold}];'
    for edge in graph["edges"]:
        yield f'  "{edge["source"]}" -> "{edge["target"]}" [label="{edge["relation"]}{_at(edge)}"];'
    yield "}"


def mermaid_lines(graph: Mapping[str, Any]) -> Iterator[str]:
    """The graph for Mermaid, which Markdown on many sites shows as a picture."""
    short = {node["id"]: f"n{number}" for number, node in enumerate(graph["nodes"])}
    yield "flowchart RL"
    for node in graph["nodes"]:
        begin, end = ("[", "]") if node["kind"] in _SQUARE else ("(", ")")
        label = "<br>".join(_entities(line) for line in _label(node))
        yield f'  {short[node["id"]]}{begin}"{label}"{end}'
    for edge in graph["edges"]:
        yield f'  {short[edge["source"]]} -->|{edge["relation"]}{_at(edge)}| {short[edge["target"]]}'
    yield f"  style {short[graph['run']]} stroke-width:3px"


def _label(node: Mapping[str, Any]) -> list[str]:
    """A name, an id that can be read, and how it stands."""
    facts = node["facts"]
    shown = node["id"] if node["kind"] in ("run", "job", "verification") else node["id"][: len("sha256:") + 12]
    more = {"run": [f"{facts.get('run_kind')}, {facts.get('status')}"], "verification": [str(facts.get("level"))]}
    return [_printable(node["label"]), shown, *more.get(node["kind"], [])]


def _at(edge: Mapping[str, Any]) -> str:
    return "" if edge["step"] is None else f" at step {edge['step']}"


def _printable(text: str) -> str:
    """Names of files and libraries come from outside: nothing of them reaches a terminal as a control character."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _entities(text: str) -> str:
    """Mermaid's way to write what it would read as its own syntax."""
    return "".join(c if c.isalnum() or c in " .,:_-/@" else f"#{ord(c)};" for c in text)
