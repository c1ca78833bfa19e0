"""Does a chat template loop over content parts, or does it want one text per message?

vLLM decides by the template's syntax tree (0.32, renderers/hf.py, --chat-template-content-format auto); the same rules
are kept here, or messages would be given in another form.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(template: nodes.Template) -> bool:
    """True where the template has a loop over a message's content. Where vLLM gives up, it takes text."""
    names = _messages_names(template)
    if names is None:
        return False
    items = [loop.target for loop in template.find_all(nodes.For) if any(_reaches(loop.iter, name) for name in names)]
    messages = {item.name for item in items if isinstance(item, nodes.Name)}
    if len(items) != sum(isinstance(item, nodes.Name) for item in items):
        return False
    loop = next(_content_loops(template, messages), None)
    return loop is not None and isinstance(loop.target, nodes.Name)


def _content_loops(template: nodes.Template, messages: set[str]) -> Iterator[nodes.For]:
    """Loops over the content itself, over a macro's parameter that is given it, and over a plain `content`."""
    parameters = _content_parameters(template, messages)
    for loop in template.find_all(nodes.For):
        looped = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        names = parameters.get(id(loop), {"content"})
        if looped in names or any(_reaches(loop.iter, message, "content") for message in messages):
            yield loop


def _content_parameters(template: nodes.Template, messages: set[str]) -> dict[int, set[str]]:
    """For each loop inside a macro: the macro's parameters that some call gives a message's content."""
    found: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in template.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            named = [(keyword.key, keyword.value) for keyword in call.kwargs if isinstance(keyword, nodes.Keyword)]
            for name, value in [*zip(names, call.args, strict=False), *named]:
                if name in names and any(_reaches(value, message, "content") for message in messages):
                    given.add(name)
        for loop in macro.find_all(nodes.For):
            found[id(loop)] = given or found.get(id(loop), set())
    return found


def _messages_names(template: nodes.Template) -> set[str] | None:
    """`messages` and every variable that is set to it or to a part of it; None where one is no plain name."""
    names, new = {"messages"}, ["messages"]
    while new:
        name = new.pop()
        for assignment in template.find_all(nodes.Assign):
            if not _reaches(assignment.node, name):
                continue
            if not isinstance(assignment.target, nodes.Name):
                return None
            if assignment.target.name not in names:
                names.add(assignment.target.name)
                new.append(assignment.target.name)
    return names


def _reaches(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """`node` is the variable (with `key`: that field of it), through any filters, tests and slices."""
    while True:
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if not sliced and not isinstance(node, nodes.Filter | nodes.Test):
            break
        node = node.node  # type: ignore[union-attr]
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not isinstance(node.arg, nodes.Const) or node.arg.value != key:
                return False
        elif not isinstance(node, nodes.Getattr) or node.attr != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
