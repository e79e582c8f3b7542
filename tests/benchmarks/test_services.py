"""The steps that are executed alone are those of the load through HTTP."""

from benchmarks.services import ServicesConfig, plan, without_drafts
from pagewire.config import ExecutorConfig
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, KVGroup

INFO = ExecutorInfo(
    incarnation=1,
    model="none",
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=frozenset([1]),
    max_logprobs=0,
    kv_groups=(KVGroup(64),),
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=16,
)


def test_every_request_is_computed_once_and_to_its_full_length() -> None:
    steps = plan(ServicesConfig(input_len=12, output_len=7), INFO, num_streams=5, first_id=10)
    assert [new.request_id for step in steps for new in step.new_requests] == list(range(10, 15))
    # The last token of each request is sampled and never computed with.
    assert sum(int(step.num_scheduled_tokens.sum()) for step in steps) == 5 * (12 + 7 - 1)
    assert max(int(step.num_scheduled_tokens.sum()) for step in steps) == 16


def test_neither_part_of_the_comparison_drafts() -> None:
    """The default of a server is to draft, on a CPU."""
    assert ServicesConfig().spec_method == "auto"
    assert without_drafts(ServicesConfig()).part(ExecutorConfig).spec_method == "none"
