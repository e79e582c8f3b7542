"""The public token-level API: parses requests, calls the engine and converts its outputs."""

from collections.abc import AsyncIterator

import grpc

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.engine import Engine
from pagewire.services.scheduler.service.request_output import MAX_UNREAD, new_outbox
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire import rpc, tenants
from pagewire.wire.request_seeds import fill_seed


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self, engine: Engine, seed: int | None = None) -> None:
        """seed: that of the server, for requests without one."""
        self._engine = engine
        self._seed = seed

    async def Generate(
        self, request: scheduler_pb2.SchedulerServiceGenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.SchedulerServiceGenerateResponse]:
        request_context = tenants.attach(tenants.present.get(), rpc.trace_of(context).attach_to(RequestContext()))
        rpc.set_timeout(request_context, context)
        fill_seed(request.request, self._seed)
        submission = TokenSubmission(request=request.request, context=request_context)
        outbox = new_outbox()
        try:
            if submission.request.adapter:
                submission.adapter_digest = (await self._engine.adapters.find(submission.request.adapter)).digest
            live = self._engine.submit(submission, outbox, 0, MAX_UNREAD)
        except rpc.RpcError as error:
            raise error.renamed("", "request") from error
        has_begun = False
        try:
            async for outputs in outbox:
                output = outputs[0]
                if output.error is not None:
                    raise output.error.renamed("", "request")
                response = convert.from_output(output)
                if not has_begun:
                    response.request_id, has_begun = request.request.external_id, True
                yield response
                if output.finish_reason is not None:
                    return
        finally:
            self._engine.abort(live)

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.AbortResponse:
        num_aborted = self._engine.abort_external(set(request.external_ids), tenants.caller_scope())
        return scheduler_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetLoadResponse:
        scheduler, info = self._engine.scheduler, self._engine.availability.info
        replicas = [replica for replica in scheduler.replicas if replica.info]
        return scheduler_pb2.GetLoadResponse(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=sum(replica.kv.num_blocks for replica in replicas),
            num_free_blocks=sum(replica.kv.num_free_blocks for replica in replicas),
            block_size=scheduler.info.block_size if scheduler.info else 0,
            max_num_seqs=sum(replica.limits.max_num_seqs for replica in replicas),
            model_info=convert.from_info(info, self._engine.adapters.listed) if info else None,
            num_executors=len(replicas),
            executors=[
                scheduler_pb2.ExecutorLoad(
                    name=replica.name,
                    num_running=replica.num_running,
                    max_num_seqs=replica.limits.max_num_seqs,
                    num_blocks=replica.kv.num_blocks,
                    num_free_blocks=replica.kv.num_free_blocks,
                    is_leaving=replica.is_leaving,
                    num_ranks=replica.info.num_ranks,
                    pipeline_stages=replica.info.pipeline_stages,
                )
                for replica in replicas
                if replica.info is not None
            ],
        )
