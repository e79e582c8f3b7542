"""The tenants of calls, which the tokenizer service passes to the scheduler."""

from pathlib import Path

import pytest

from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from pagewire.wire import rpc
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine

BY_CLIENTS = [("x-tenant-id", "alice")]
BY_SERVICES = [("pagewire-tenant", "bob"), ("pagewire-tenant-weight", "2.0")]


@pytest.mark.parametrize("kind", [common_pb2.MODEL_KIND_UNSPECIFIED, common_pb2.MODEL_KIND_EMBED])
async def test_each_port_believes_its_own_callers(tmp_path: Path, smollm2_gguf: Path, kind: int) -> None:
    scheduler = FakeScheduler(lambda request: [400, EOS], kind=kind)
    public = f"unix:{tmp_path}/public.sock"
    line = TokenizerLine(tmp_path, scheduler, smollm2_gguf, public_listen=public, tenant_header="X-Tenant-ID")
    pool = TokenizerPool(FileSource(str(smollm2_gguf)), size=1)
    async with line.running(pool=pool), rpc.channel(public) as channel:
        await scheduler.until(lambda: line.link.is_ready)
        for stub in (InferenceServiceStub(channel), line.stub):
            for metadata in (BY_CLIENTS, BY_SERVICES):
                if kind:
                    await stub.Embed(inference_pb2.EmbedRequest(inputs=[{"text": "Say"}]), metadata=metadata)
                else:
                    call = stub.Generate(inference_pb2.GenerateRequest(text="Say"), metadata=metadata)
                    assert [response async for response in call]
    pool.close()
    reported = [(one.context.tenant, one.context.tenant_weight) for one in scheduler.submissions]
    assert reported == [("alice", 0), ("", 0), ("", 0), ("bob", 2)]
