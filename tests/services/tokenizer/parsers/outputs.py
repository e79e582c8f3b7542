"""Outputs of models, and what they say. Calls are (name, arguments as the model wrote them)."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


WEATHER = ("get_weather", '{"city": "Paris", "days": 2}')
WEATHER_ON_A_LINE = ("get_weather", '{"city": "Paris\\n", "days": 2}')
TIME = ("now", "{}")
# Braces, quotes, marks of other parsers and what looks like an end, inside a string.
HARD = ("run", '{"code": "if (x) { s = \\"}]</tool_call>\\\\\\"; } // \\u00e9 [TOOL_CALLS]", "n": [1, {"a": null}]}')


def object_of(call: tuple[str, str], key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f"<tool_call>\n{object_of(call)}\n</tool_call>" for call in calls)


def deepseek_v3(*calls: tuple[str, str]) -> str:
    each = [f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>" for n, a in calls]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(*calls: tuple[str, str]) -> str:
    each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def gpt_oss(*calls: tuple[str, str]) -> str:
    return "".join(f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{a}<|call|>" for n, a in calls)


def kimi_k2(*calls: tuple[str, str]) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def qwen3_coder(name: str, **arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm45(name: str, line: str = "\n", **arguments: str) -> str:
    each = [f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments.items()]
    return f"<tool_call>{name}{line}{''.join(each)}</tool_call>"


def minimax_m2(*calls: tuple[str, dict[str, str]]) -> str:
    each = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    ]
    return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


# For tools with separate arguments: the arguments as text and as JSON.
SCHEMAS = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "now": {},
    "run": {"code": {"type": "string"}, "deep": {"type": "object"}, "note": {"type": ["string", "null"]}},
}
CODE = 'if (x < 1) {\n\ts = "é\\n";\n} // </param [TOOL_CALLS]\n'
RUN = ("run", '{"code": ' + json.dumps(CODE, ensure_ascii=False) + ', "deep": {"a": [1, null]}, "note": null}')
RUN_AS_TEXT = {"code": CODE, "deep": '{"a": [1, null]}', "note": "null"}
# Without a schema what reads like JSON is JSON, or Python.
GUESSED = ("guess", '{"a": 1, "b": "x y", "c": [true, null], "d": "1.2.3"}')
GUESSED_AS_TEXT = {"a": "1", "b": "x y", "c": "[True, None]", "d": "1.2.3"}
PARIS = {"city": "Paris", "days": "2"}


# What is text to every parser.
PLAIN = [
    "",
    "Hello, world.\n\nIt is 5 < 7 and {braces} are [fine].\n",
    "  \n",
    "\n" * 300 + "a" + " " * 700,
    "A lone < at the end <",
    "</tool_call> closes nothing",
]

TOOL_CALLS: dict[str, list[tuple[str, Said]]] = {
    "hermes": [
        (hermes(WEATHER), Said("", (WEATHER,))),
        (hermes(WEATHER, TIME, HARD), Said("", (WEATHER, TIME, HARD))),
        ("I look.\n\n" + hermes(WEATHER) + "\n", Said("I look.", (WEATHER,))),
        (hermes(WEATHER) + "\n\nDone. ", Said("\n\nDone. ", (WEATHER,))),
        ("\n\n" + hermes(WEATHER), Said("", (WEATHER,))),
        (f"<tool_call>{object_of(WEATHER)}</tool_call><tool_call>{object_of(TIME)}", Said("", (WEATHER, TIME))),
        # Arguments first, as Hermes 2 was taught; further members.
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', Said("", (("f", '{"a": 1}'),))),
        ('<tool_call>{"id": "x", "type": "function", "name": "f", "arguments": {}, "id": "y"}</tool_call>',
         Said("", (("f", "{}"),))),
        ('<tool_call>{"name": "f"}</tool_call>', Said("", (("f", "{}"),))),
        ('<tool_call>{"name": "\\u0066\\"", "arguments": {}}</tool_call>', Said("", (('f"', "{}"),))),
        # Cut off, or without what should close it.
        ('<tool_call>{"name": "f", "arguments": {"a": "b', Said("", (("f", '{"a": "b'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', Said("", (("f", '{"a": 1}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_c', Said("", (("f", '{"a": 1}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', Said("!", (("f", '{"a": 1}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call>',
         Said(', "b": 2}</tool_call>', (("f", '{"a": 1}'),))),
        # Arguments that are no JSON are what the model wrote.
        ('<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', Said("", (("f", '{"a": tru}'),))),
        # No calls.
        ("<tool_call>", Said("<tool_call>")),
        ("<tool_c", Said("<tool_c")),
        ("a <tool_call> b </tool_call> c", Said("a <tool_call> b </tool_call> c")),
        ("x \n<tool_call>oops " + hermes(TIME), Said("x \n<tool_call>oops", (TIME,))),
        ("<tool_call><tool_call>" + object_of(TIME), Said("<tool_call>", (TIME,))),
        ('<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
         Said('<tool_call>{"name": "f", "arguments": "a"}</tool_call>')),
        ('<tool_call>{"name": 1}', Said('<tool_call>{"name": 1}')),
        ('<tool_call>{"name": "", "arguments": {}}', Said('<tool_call>{"name": "", "arguments": {}}')),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', Said('<tool_call>{"name": "\\ud800", "arguments": {}}')),
        ('<tool_call>{"name": "f", "name": "g"}', Said('<tool_call>{"name": "f", "name": "g"}')),
        ('<tool_call>{"arguments": {"a": 1}}', Said('<tool_call>{"arguments": {"a": 1}}')),
        ('<tool_call>{"arguments": {"a": 1', Said('<tool_call>{"arguments": {"a": 1')),
        ('<tool_call>{"function": "f"}', Said('<tool_call>{"function": "f"}')),
        ("<tool_call>[1]</tool_call>", Said("<tool_call>[1]</tool_call>")),
        ("<tool_call>{" + " " * 250 + '"name": "f"}', Said("<tool_call>{" + " " * 250 + '"name": "f"}')),
        ('<tool_call>{"name": "' + "f" * 300 + '"}', Said('<tool_call>{"name": "' + "f" * 300 + '"}')),
    ],
    "nearly hermes": [
        ("<tool_call>{'name': 'f', 'arguments': {'a': 'it\\'s \"x\"', 'b': True, 'c': None}}</tool_call>",
         Said("", (("f", '{"a": "it\'s \\"x\\"", "b": true, "c": null}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, 2,],},}</tool_call>', Said("", (("f", '{"a": [1, 2]}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN, "b": -Infinity, "c": [Infinity]}}</tool_call>',
         Said("", (("f", '{"a": null, "b": null, "c": [null]}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\n\ty", "b": "\\d"}}</tool_call>',
         Said("", (("f", '{"a": "x\\n\\ty", "b": "\\\\d"}'),))),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": {\\"b\\": \\"}\\"}}"}</tool_call>!',
         Said("!", (("f", '{"a": {"b": "}"}}'),))),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', Said("", (("f", "{}"),))),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', Said("", (("f", "{}"),))),
        ('<tool_call>{"arguments": "{}", "name": "f"}</tool_call>', Said("", (("f", "{}"),))),
        ('<tool_call>{"name": "f", "arguments": [1]}', Said('<tool_call>{"name": "f", "arguments": [1]}')),
        ('<tool_call>\n```json\n{"name": "f", "arguments": {}}\n```\n</tool_call> ok', Said(" ok", (("f", "{}"),))),
        ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call> ok',
         Said(" ok", (("f", '{"a": 1}'),))),
        ('<tool_call>{"function": {"name": "f", "parameters": {}}, "id": "x"}</tool_call>', Said("", (("f", "{}"),))),
        (f"<tool_call>\n[{object_of(TIME)}, {object_of(WEATHER)}]\n</tool_call>", Said("", (TIME, WEATHER))),
        (f"<tool_call>\n{object_of(TIME)}\n{object_of(WEATHER)}\n</tool_call> ok", Said(" ok", (TIME, WEATHER))),
        ('<tool_call>{"name": "unknown tool", "arguments": {}}</tool_call>', Said("", (("unknown tool", "{}"),))),
        ('<tool_call>get_weather(city="Paris")</tool_call>', Said('<tool_call>get_weather(city="Paris")</tool_call>')),
        ('<tool_call>{"name": "f", "arguments": {\'a\': \'b', Said("", (("f", '{"a": "b'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": 1,', Said("", (("f", '{"a": 1,'),))),
    ],
    "nearly llama3_json": [
        ("{'name': 'f', 'parameters': {'a': 1,}}", Said("", (("f", '{"a": 1}'),))),
        ('{"type": "function", "function": {"name": "f", "parameters": {}}}', Said("", (("f", "{}"),))),
        ('```json\n{"name": "f", "parameters": {}}\n```', Said('```json\n{"name": "f", "parameters": {}}\n```')),
        ('{"name": "f", "parameters": "{\\"a\\": 1}"}', Said("", (("f", '{"a": 1}'),))),
        ("```python\nx = {}\n```", Said("```python\nx = {}\n```")),
    ],
    "nearly mistral": [
        ("[TOOL_CALLS] [{'name': 'f', 'arguments': {'a': NaN,}},]", Said("", (("f", '{"a": null}'),))),
        ('[TOOL_CALLS]f[ARGS]{"a": NaN, }', Said("", (("f", '{"a": null }'),))),
        (f'[TOOL_CALLS] {object_of(WEATHER)}', Said("", (WEATHER,))),
        ('[TOOL_CALLS] [{"name": "f", "arguments": "{}"}]', Said("", (("f", "{}"),))),
    ],
    "nearly granite": [
        ("<|tool_call|>[{'name': 'f', 'arguments': null}]", Said("", (("f", "{}"),))),
        (f"<|tool_call|>{object_of(WEATHER)}", Said("", (WEATHER,))),
    ],
    "nearly deepseek_v3": [
        (deepseek_v3(("f", "{'a': True,}")), Said("", (("f", '{"a": true}'),))),
    ],
    "nearly deepseek_v31": [
        (deepseek_v31(("f", '{"a": [NaN,]}')), Said("", (("f", '{"a": [null]}'),))),
    ],
    "nearly kimi_k2": [
        (kimi_k2(("f", '{"a": "x\ny",}')), Said("", (("f", '{"a": "x\\ny"}'),))),
    ],
    "nearly qwen3_coder": [
        (qwen3_coder("get_weather", **PARIS).removeprefix("<tool_call>\n"), Said("", (WEATHER,))),
        ("I look.\n" + qwen3_coder("now").removeprefix("<tool_call>\n"), Said("I look.", (TIME,))),
        (qwen3_coder("get_weather", **PARIS).replace("\n</parameter>", ""), Said("", (WEATHER,))),
        (qwen3_coder("get_weather", **PARIS).replace("</parameter>", ""), Said("", (WEATHER_ON_A_LINE,))),
        (qwen3_coder("get_weather", **PARIS).removesuffix("\n</tool_call>"), Said("", (WEATHER,))),
        (qwen3_coder("run", code="a </function> b <parameter=\n<function=f> c"),
         Said("", (("run", '{"code": "a </function> b <parameter=\\n<function=f> c"}'),))),
        (qwen3_coder("guess", a="NaN", b="[1, Infinity]", c="{'x': None,}"),
         Said("", (("guess", '{"a": null, "b": [1, null], "c": {"x": null}}'),))),
        ("Write <function= for a call.", Said("Write <function= for a call.")),
    ],
    "nearly glm45": [
        (glm45("get_weather", **PARIS).replace("</arg_value>", ""), Said("", (WEATHER_ON_A_LINE,))),
        (glm45("guess", a="-Infinity", b="[1,]"), Said("", (("guess", '{"a": null, "b": [1]}'),))),
    ],
    "nearly minimax_m2": [
        (minimax_m2(("get_weather", PARIS)).replace("</parameter>", ""), Said("", (WEATHER_ON_A_LINE,))),
        (minimax_m2(("guess", {"a": "NaN"})), Said("", (("guess", '{"a": null}'),))),
    ],
    "nearly pythonic": [
        ("[f(a=float('nan'))]", Said("[f(a=float('nan'))]")),
        ("[f(a=nan, b=[NaN, inf, -Infinity], c={'d': true,})]",
         Said("", (("f", '{"a": null, "b": [null, null, null], "c": {"d": true}}'),))),
    ],
    "nearly gpt_oss": [
        (gpt_oss(("f", "{'a': None}")), Said("", (("f", '{"a": null}'),))),
    ],
    "llama3_json": [
        (object_of(WEATHER, "parameters"), Said("", (WEATHER,))),
        ("\n " + object_of(WEATHER), Said("", (WEATHER,))),
        ("<|python_tag|>" + object_of(HARD, "parameters"), Said("", (HARD,))),
        ('{"type": "function", "name": "now", "parameters": {}}', Said("", (TIME,))),
        (object_of(WEATHER) + "; " + object_of(TIME) + ";" + object_of(HARD), Said("", (WEATHER, TIME, HARD))),
        (object_of(WEATHER) + "; and more", Said("; and more", (WEATHER,))),
        (object_of(WEATHER) + "; ", Said("; ", (WEATHER,))),
        (object_of(WEATHER) + '; {"a": 1}', Said('; {"a": 1}', (WEATHER,))),
        ("Text first " + object_of(WEATHER), Said("Text first " + object_of(WEATHER))),
        ("Text first <|python_tag|>" + object_of(WEATHER), Said("Text first", (WEATHER,))),
        ('<|python_tag|>brave_search.call(query="x")', Said('<|python_tag|>brave_search.call(query="x")')),
        # Answers in JSON.
        ('{"name": "Ann"}', Said('{"name": "Ann"}')),
        (' {"name": "Ann", "age": 3}', Said(' {"name": "Ann", "age": 3}')),
        ("{}", Said("{}")),
        ("{", Said("{")),
    ],
    "pythonic": [
        ('[get_weather(city="Paris", days=2)]', Said("", (WEATHER,))),
        ("<|python_start|>[get_weather(city='Paris', days=2), now()]<|python_end|>", Said("", (WEATHER, TIME))),
        ("  [now( ) , a.b-c(x=-1.5,)]\n", Said("", (TIME, ("a.b-c", '{"x": -1.5}')))),
        ("[f(a=[1, (2,)], b={'c': None, \"d\": false}, e='x)]\\'', g=true)] bye",
         Said(" bye", (("f", '{"a": [1, [2]], "b": {"c": null, "d": false}, "e": "x)]\'", "g": true}'),))),
        # One argument is missing its end, is not plain, or has no name.
        ("[now(), f(x=g())] ok", Said(", f(x=g())] ok", (TIME,))),
        ("[now(), f(1)]", Said(", f(1)]", (TIME,))),
        ("[now(), and more", Said(", and more", (TIME,))),
        ("[now(", Said("[now(")),
        ("[f(**{'a': 1})]", Said("[f(**{'a': 1})]")),
        ("[f(a=1, a=2)]", Said(", a=2)]", (("f", '{"a": 1}'),))),
        ("[f(a='x' 'y')]", Said(" 'y')]", (("f", '{"a": "x"}'),))),
        ("[f(a='', b='''x''', c='\\n\\x41\\u00e9\\101\\d\\'', d=\"it's\\\n\")]",
         Said("", (("f", '{"a": "", "b": "x", "c": "\\nA\\u00e9A\\\\d\'", "d": "it\'s"}'),))),
        ("[f(a='\\ud83d\\ude42 \\u12 \n')]", Said("", (("f", '{"a": "\\ud83d\\ude42 \\\\u12 \\n"}'),))),
        ("[f(a='\\ud800')]", Said("", (("f", '{"a": "\\ud800"}'),))),
        # Cut off.
        ("[f(a=1, b='x", Said("", (("f", '{"a": 1, "b": "x'),))),
        ("[f(a='x\\", Said("", (("f", '{"a": "x'),))),
        ("[f(a='x', b=[1", Said("", (("f", '{"a": "x"'),))),
        ("[f(a='x', b", Said("", (("f", '{"a": "x"'),))),
        ("[f(a='x'", Said("", (("f", '{"a": "x"'),))),
        ("[f(a=1", Said("[f(a=1")),
        ("[f(a=1e999)]", Said("[f(a=1e999)]")),
        ("[f(a={1: 2})]", Said("[f(a={1: 2})]")),
        ("[f(a=" + "[" * 300 + "]" * 300 + ")]", Said("[f(a=" + "[" * 300 + "]" * 300 + ")]")),
        ("[1, 2, 3]", Said("[1, 2, 3]")),
        ("[link](https://example.com)", Said("[link](https://example.com)")),
        ("[a b]", Said("[a b]")),
        ("See [now()]", Said("See [now()]")),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{object_of(WEATHER)}, {object_of(HARD)}]", Said("", (WEATHER, HARD))),
        (f"Well. [TOOL_CALLS][{object_of(TIME)}]", Said("Well.", (TIME,))),
        (f'[TOOL_CALLS] [{object_of(TIME)[:-1]}, "id": "abcdefghi"}}]', Said("", (TIME,))),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now{}', Said("", (WEATHER, TIME))),
        ("[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", Said("", (TIME,))),
        ("[TOOL_CALLS]now[ARGS]{}] text", Said("] text", (TIME,))),
        (f"[TOOL_CALLS] [{object_of(TIME)}, 1]", Said(", 1]", (TIME,))),
        ("[TOOL_CALLS] []", Said("[TOOL_CALLS] []")),
        ("[TOOL_CALLS] no call at all", Said("[TOOL_CALLS] no call at all")),
        ("[TOOL_CALLS]" + "x" * 600 + "{}", Said("[TOOL_CALLS]" + "x" * 600 + "{}")),
    ],
    "deepseek_v3": [
        (deepseek_v3(WEATHER), Said("", (WEATHER,))),
        ("Let me see.\n" + deepseek_v3(WEATHER, TIME, HARD), Said("Let me see.", (WEATHER, TIME, HARD))),
        (deepseek_v3(WEATHER) + " Done", Said(" Done", (WEATHER,))),
        (deepseek_v3(WEATHER)[:-39], Said("", (WEATHER,))),
        ("<｜tool▁calls▁begin｜>nothing", Said("<｜tool▁calls▁begin｜>nothing")),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f g\n```json\n{}", Said(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f g\n```json\n{}")),
    ],
    "deepseek_v31": [
        (deepseek_v31(WEATHER), Said("", (WEATHER,))),
        ("Let me see." + deepseek_v31(WEATHER, TIME, HARD), Said("Let me see.", (WEATHER, TIME, HARD))),
        (deepseek_v31(WEATHER)[:-30], Said("", (WEATHER,))),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]", Said("<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]")),
    ],
    "kimi_k2": [
        (kimi_k2(WEATHER), Said("", (WEATHER,))),
        ("Let me see." + kimi_k2(WEATHER, TIME, HARD) + " Done", Said("Let me see. Done", (WEATHER, TIME, HARD))),
        (kimi_k2(WEATHER)[:-40], Said("", (WEATHER,))),
        ("<|tool_call_begin|>now:12 <|tool_call_argument_begin|> {}", Said("", (TIME,))),
        ("<|tool_call_begin|>now<|tool_call_argument_begin|>{}",
         Said("<|tool_call_begin|>now<|tool_call_argument_begin|>{}")),
    ],
    "granite": [
        (f"<|tool_call|>[{object_of(WEATHER)}, {object_of(HARD)}]", Said("", (WEATHER, HARD))),
        (f"Well.\n<tool_call>[{object_of(TIME)}]</tool_call>", Said("Well.", (TIME,))),
        (f"<|tool_call|> [{object_of(TIME)}]<|/tool_call|> ok", Said(" ok", (TIME,))),
        ("<|tool_call|>now", Said("<|tool_call|>now")),
        ("<|tool_call|>[1]", Said("<|tool_call|>[1]")),
    ],
    "qwen3_coder": [
        (qwen3_coder("get_weather", **PARIS), Said("", (WEATHER,))),
        ("I look.\n\n" + qwen3_coder("run", **RUN_AS_TEXT) + "\n" + qwen3_coder("now"), Said("I look.", (RUN, TIME))),
        (qwen3_coder("guess", **GUESSED_AS_TEXT), Said("", (GUESSED,))),
        ("<tool_call><function=now></function></tool_call> ok", Said(" ok", (TIME,))),
        ("<tool_call><function=run><parameter=code></parameter><parameter=note>a null</parameter></function>",
         Said("", (("run", '{"code": "", "note": "a null"}'),))),
        # Cut off, or not as it should be.
        (qwen3_coder("get_weather", **PARIS)[:56], Said("", (("get_weather", '{"city": "Pari'),))),
        ("<tool_call>\n<function=now>\n<param", Said("", (("now", ""),))),
        ("<tool_call>\n<function=get_weather>\n<parameter=days>\n1", Said("", (("get_weather", '{"days": '),))),
        ("<tool_call>\n<function=now>\noops</function>", Said("\noops</function>", (TIME,))),
        ("<tool_call>\n<function=f g>", Said("<tool_call>\n<function=f g>")),
        ("<tool_call>\n<fun", Said("<tool_call>\n<fun")),
        ("a <tool_call> b", Said("a <tool_call> b")),
        ('<tool_call>{"name": "now"}</tool_call>', Said('<tool_call>{"name": "now"}</tool_call>')),
    ],
    "glm45": [
        (glm45("get_weather", **PARIS), Said("", (WEATHER,))),
        ("I look." + glm45("run", line="", **RUN_AS_TEXT) + "\n" + glm45("now"), Said("I look.", (RUN, TIME))),
        (glm45("guess", **GUESSED_AS_TEXT), Said("", (GUESSED,))),
        (glm45("get_weather", **PARIS)[:62], Said("", (("get_weather", '{"city": "Pari'),))),
        ("<tool_call>now", Said("<tool_call>now")),
        ("<tool_call>two words</tool_call>", Said("<tool_call>two words</tool_call>")),
        ("<tool_call>now\n<arg_key>a</arg_key>\nb</tool_call>", Said("<arg_key>a</arg_key>\nb</tool_call>", (TIME,))),
    ],
    "minimax_m2": [
        (minimax_m2(("get_weather", PARIS)), Said("", (WEATHER,))),
        ("I look.\n" + minimax_m2(("run", RUN_AS_TEXT), ("now", {})) + " ok", Said("I look. ok", (RUN, TIME))),
        (minimax_m2(("guess", GUESSED_AS_TEXT)), Said("", (GUESSED,))),
        (minimax_m2(("now", {})).replace("</minimax:tool_call>", "<inv"), Said("\n<inv", (TIME,))),
        (minimax_m2(("now", {})).replace("</minimax:tool_call>", "<invoke>"), Said("\n<invoke>", (TIME,))),
        ("<minimax:tool_call>\n<tool>", Said("<minimax:tool_call>\n<tool>")),
    ],
    "listed": [
        (f"[{object_of(WEATHER)}, {object_of(HARD)}]", Said("", (WEATHER, HARD))),
        (f" [{object_of(TIME)},{object_of(WEATHER)}", Said("", (TIME, WEATHER))),
        # Cut off by max_tokens: the grammar admits nothing but calls.
        ("[", Said()),
        ('[{"na', Said()),
        ('[{"name": "get_w', Said("", (("get_w", ""),))),
        ('[{"name": "get_we', Said("", (("get_weather", ""),))),
        ('[{"name": "', Said()),
        ('[{"name": "f", "argu', Said("", (("f", ""),))),
        (f'[{object_of(TIME)}, {{"name": "get_weather', Said("", (TIME, ("get_weather", "")))),
        (f"[{object_of(TIME)}, ", Said("", (TIME,))),
        (f"[{object_of(TIME)}", Said("", (TIME,))),
        ('[{"name": "f", "arguments": {"a": "b', Said("", (("f", '{"a": "b'),))),
        ("[1, 2", Said("[1, 2")),
    ],
    "named": [
        (WEATHER[1], Said("", (("f", WEATHER[1]),))),
        (" " + HARD[1][:-5], Said("", (("f", HARD[1][:-5]),))),
    ],
    "gpt_oss": [
        (gpt_oss(WEATHER), Said("", (WEATHER,))),
        (gpt_oss(WEATHER, HARD), Said("", (WEATHER, HARD))),
        ("<|channel|>commentary to=functions.f<|message|>no JSON<|call|>",
         Said("<|channel|>commentary to=functions.f<|message|>no JSON<|call|>")),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>",
         Said("<|channel|>commentary to=browser.search<|message|>{}<|call|>")),
    ],
}  # fmt: skip

# By (parser, end of the prompt).
REASONING: dict[tuple[str, str], list[tuple[str, Said]]] = {
    ("qwen3", "<|im_start|>assistant\n"): [
        ("<think>\nHm. 1 < 2\n\n</think>\n\nYes.\n", Said("Yes.\n", reasoning="Hm. 1 < 2")),
        ("\n<think></think>Yes.", Said("Yes.")),
        ("<think>Hm. </thin", Said(reasoning="Hm. </thin")),
        ("<think>Hm.\n", Said(reasoning="Hm.\n")),
        ("<think>Hm.</think>", Said(reasoning="Hm.")),
        ("Yes. <think>no</think>", Said("Yes. <think>no</think>")),
        ("<thin", Said("<thin")),
        ("  Yes", Said("  Yes")),
    ],
    ("qwen3", "<｜Assistant｜><think>\n"): [
        ("Hm.</think>Yes. </think>", Said("Yes. </think>", reasoning="Hm.")),
        ("<think>\nHm.</think>Yes.", Said("Yes.", reasoning="Hm.")),
        ("Hm. <think>", Said(reasoning="Hm. <think>")),
    ],
    ("qwen3", "<think>\n\n</think>\n\n"): [
        ("Yes.", Said("Yes.")),
        ("<think>Hm.</think>", Said("<think>Hm.</think>")),
    ],
    ("deepseek_r1", "<｜Assistant｜>"): [
        ("Hm.\n</think>\n\nYes.", Said("Yes.", reasoning="Hm.")),
        ("<think>\nHm.\n</think>\n\nYes.", Said("Yes.", reasoning="Hm.")),
        ("Hm.", Said(reasoning="Hm.")),
    ],
    ("mistral", "[/INST]"): [
        ("[THINK]Hm.[/THINK]Yes.", Said("Yes.", reasoning="Hm.")),
    ],
    ("gpt_oss", "<|start|>assistant"): [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
         Said("Yes.", reasoning="Hm.")),
        ("<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
         "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|channel|>final<|message|>Yes.",
         Said("I look.\nYes.", reasoning="A\nB")),
        ("<|channel|>final<|message|>cut o", Said("cut o")),
        ("<|channel|>fin", Said()),
        ("<|message|>Yes.", Said("Yes.")),
        ("No marks < at all", Said("No marks < at all")),
        ("to", Said("to")),
        ("to=nobody", Said("to=nobody")),
        ("<|channel|>" + "x" * 600, Said("<|channel|>" + "x" * 600)),
        ("<|channel|>final<|message|>Yes.<|end|> more", Said("Yes.\n more")),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
         Said("<|channel|>commentary to=functions.f<|message|>{}<|call|>")),
    ],
}  # fmt: skip
