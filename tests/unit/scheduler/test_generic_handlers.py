"""Services added without registering their methods: served as ever, and no method is waited for apart."""

from collections.abc import Mapping

import grpc
import pytest

from lorafleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from scheduler.generic_handlers import GenericHandlers


class Inference(inference_pb2_grpc.InferenceServicer):
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(max_model_len=7)


async def test_methods_are_served_and_unknown_ones_told(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []

    def register(self: grpc.aio.Server, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        registered.extend(handlers)

    monkeypatch.setattr(grpc.aio.Server, "add_registered_method_handlers", register)
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), GenericHandlers(server))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await stub.Tokenize(inference_pb2.TokenizeRequest(text="a"))).max_model_len == 7
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await fleet_pb2_grpc.FleetStub(channel).Cordon(fleet_pb2.CordonRequest())
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)
    assert not registered
