from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ServiceMetrics]
    def __init__(self, services: _Optional[_Iterable[_Union[ServiceMetrics, _Mapping]]] = ...) -> None: ...

class ServiceMetrics(_message.Message):
    __slots__ = ("service", "exposition")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    EXPOSITION_FIELD_NUMBER: _ClassVar[int]
    service: str
    exposition: str
    def __init__(self, service: _Optional[str] = ..., exposition: _Optional[str] = ...) -> None: ...
