"""The gRPC server: sync, pick and health on one port."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvrouting.v1 import pick_pb2, pick_pb2_grpc, sync_pb2, sync_pb2_grpc
from kvrouting_router.grpc_pick import PickService
from kvrouting_router.grpc_sync import WorkerSyncService

_logger = logging.getLogger(__name__)

# A snapshot chunk of a million blocks fits.
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A sidecar's host that vanished without a word is noticed in half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files, looked at for every connection. client_ca: workers must show a certificate of it; None: they need
    none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Reads the files. Raises: OSError naming the one that cannot be read."""
        return grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._read_anew,  # type: ignore[arg-type]  # the stubs leave out that None is an answer
            require_client_authentication=self.client_ca is not None,
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=self.client_ca.read_bytes() if self.client_ca else None,
        )

    def _read_anew(self) -> grpc.ServerCertificateConfiguration | None:
        """None: those that were good stay in force."""
        try:
            return self._read()
        except OSError as error:
            _logger.warning("the certificate stays as it is", extra={"fields": {"reason": str(error)}})
            return None


class GrpcServer:
    """Owns the port. Made and stopped on the event loop."""

    def __init__(
        self, *, sync: WorkerSyncService, pick: PickService, host: str, port: int, tls: TlsFiles | None
    ) -> None:
        """port: 0 for a free one. Raises: RuntimeError if the port is taken."""
        self._server = grpc.aio.server(options=_OPTIONS)
        sync_pb2_grpc.add_WorkerSyncServicer_to_server(sync, self._server)
        pick_pb2_grpc.add_PickerServicer_to_server(pick, self._server)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if tls is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, tls.credentials())
        if not self.port:
            raise RuntimeError(f"cannot listen on {address} for gRPC")

    async def start(self) -> None:
        """Serves from now on."""
        await self._server.start()
        for service in ("", *(self._service_names())):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    @staticmethod
    def _service_names() -> tuple[str, str]:
        return (
            sync_pb2.DESCRIPTOR.services_by_name["WorkerSync"].full_name,
            pick_pb2.DESCRIPTOR.services_by_name["Picker"].full_name,
        )

    async def announce_stop(self) -> None:
        """Health checks fail from now on; streams go on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Ends all streams."""
        await self._server.stop(grace=0.5)
