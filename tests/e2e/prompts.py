"""Twenty prompts for parity: English, code, Chinese, emoji, markup; 1 to 2,000 tokens."""

_STORY = (
    "The lighthouse keeper climbed the stairs every evening at six, carrying a lamp, a book and a pot of tea. "
    "From the gallery she could count the boats coming home, and she wrote their names in a ledger that nobody read. "
    "One night in March the count was short by one. "
)
_CODE = (
    "def merge(left: list[int], right: list[int]) -> list[int]:\n"
    "    result, i, j = [], 0, 0\n"
    "    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n"
    "            result.append(left[i]); i += 1\n"
    "        else:\n"
    "            result.append(right[j]); j += 1\n"
    "    return result + left[i:] + right[j:]\n\n"
)

PROMPTS = [
    "A",
    "Hello",
    "The capital of France is",
    "Once upon a time",
    "1, 1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n",
    "SELECT name, count(*) FROM users WHERE",
    "人工智能的未来是",
    "从前有一座山，山里有一座庙，庙里有一个老和尚",
    "🎉🎂 Happy birthday! 🎈",
    "👩‍🚀 says hello to the 🌍 and",
    "Ein kurzer Satz auf Deutsch: Der Himmel ist",
    '{"name": "Ada", "year": 1815, "city":',
    "<html>\n<head><title>Test</title></head>\n<body>\n",
    "Q: What is 17 + 25?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    _STORY,
    _CODE * 2 + "def merge_sort(",
    _STORY * 8,
    "".join(f"Chapter {n}. {_STORY}" for n in range(1, 33)),
]
