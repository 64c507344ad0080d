"""Which processes a command line asks for: how many, where their engines are, and what does not go together."""

import argparse
import dataclasses
from dataclasses import dataclass, field

from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.engine.core_client.remote import check_addresses
from rustvllm.exceptions import ConfigError
from rustvllm.process.address import EngineAddress, read_secret

_OF_FRONT_ENDS = frozenset({"served_model_name", "tokenizer", "trace", "trace_file", "otlp_traces_endpoint"})
"""Engine arguments that a front end of running engines may have: it may call the model what it likes, and has traces of
its own."""


@dataclass(frozen=True)
class ProcessLayout:
    """The processes of one server.

    Attributes:
        num_api_processes: 0 with ``--headless``.
        num_engines: Engine processes, started here or running elsewhere.
        starts_engines: Whether they are started here.
        in_one_process: API and engine are threads of one process.
        addresses: Where engines are; empty: in a private directory of this server's.
        secret: What TCP needs.
        follows_head: This is a node of a model whose engine is on another machine.
    """

    num_api_processes: int = 1
    num_engines: int = 1
    starts_engines: bool = True
    in_one_process: bool = False
    addresses: tuple[EngineAddress, ...] = ()
    secret: bytes | None = field(default=None, repr=False)
    follows_head: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ProcessLayout":
        """The layout of a command line.

        Raises:
            ConfigError: Two flags contradict each other, or an address or secret is wrong.
        """
        is_headless = args.headless or args.api_server_count == 0
        if args.headless and args.api_server_count:
            raise ConfigError(
                f"--headless and --api-server-count {args.api_server_count} contradict each other: leave one out"
            )
        if args.stall_action == "end" and not args.stall_timeout:
            raise ConfigError("--stall-action end needs a --stall-timeout of more than 0 seconds, got 0")
        if args.data_parallel_size == 0:
            raise ConfigError("--data-parallel-size must be at least 1, got 0")
        if getattr(args, "node_rank", 0):
            return cls._of_follower(args)
        if args.disable_frontend_multiprocessing:
            _refuse_what_needs_processes(args, is_headless=is_headless)
            return cls(in_one_process=True)
        addresses = tuple(EngineAddress.parse(text) for text in args.engine_address or ())
        nnodes = getattr(args, "nnodes", 1)
        needs_secret = nnodes > 1 or any(address.is_tcp for address in addresses)
        secret = read_secret(args.engine_secret_file) if needs_secret else None
        if nnodes > 1:
            _check_node_secret(secret, nnodes)
        if addresses:
            check_addresses(addresses, secret)
            _check_count(args.data_parallel_size, len(addresses), is_headless=is_headless)
        if addresses and not is_headless:
            _refuse_engine_flags(args)
            if any(address.is_tcp and address.port == 0 for address in addresses):
                raise ConfigError("--engine-address of a running engine needs its port, got 0")
        return cls(
            num_api_processes=0 if is_headless else args.api_server_count or 1,
            num_engines=len(addresses) or args.data_parallel_size or 1,
            starts_engines=is_headless or not addresses,
            addresses=addresses,
            secret=secret,
        )

    @classmethod
    def _of_follower(cls, args: argparse.Namespace) -> "ProcessLayout":
        """A machine that serves nothing: its ranks are started for an engine on another one."""
        if not args.headless:
            raise ConfigError(
                f"--node-rank {args.node_rank} only runs ranks, because the engine is on node 0, so this machine "
                "cannot serve the API: add --headless"
            )
        others = {
            "--engine-address": bool(args.engine_address),
            "--disable-frontend-multiprocessing": args.disable_frontend_multiprocessing,
        }
        for flag, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"--node-rank {args.node_rank} has no engine of its own, because the engine is on node 0: leave "
                    f"{flag} out"
                )
        secret = read_secret(args.engine_secret_file)
        _check_node_secret(secret, getattr(args, "nnodes", 1))
        return cls(num_api_processes=0, num_engines=0, secret=secret, follows_head=True)


def _check_node_secret(secret: bytes | None, nnodes: int) -> None:
    if secret is None:
        raise ConfigError(
            f"--nnodes {nnodes} needs a secret of 16 bytes or more on each machine: set RUSTVLLM_ENGINE_SECRET, or "
            "--engine-secret-file; make one with: openssl rand -hex 32"
        )


def _refuse_what_needs_processes(args: argparse.Namespace, *, is_headless: bool) -> None:
    others = {
        f"--api-server-count {args.api_server_count}": args.api_server_count not in (None, 1),
        f"--data-parallel-size {args.data_parallel_size}": args.data_parallel_size not in (None, 1),
        "--headless": is_headless,
        "--engine-address": bool(args.engine_address),
        "--restart-engine": args.restart_engine,
        "--stall-action end": args.stall_action == "end",
    }
    for flag, is_given in others.items():
        if is_given:
            raise ConfigError(
                f"--disable-frontend-multiprocessing runs one API and one engine in one process, but {flag} needs "
                "several processes: leave one of them out"
            )


def _check_count(data_parallel_size: int | None, num_addresses: int, *, is_headless: bool) -> None:
    num_engines = (data_parallel_size or 1) if is_headless else (data_parallel_size or num_addresses)
    if num_engines != num_addresses:
        raise ConfigError(
            f"--data-parallel-size {num_engines} needs the same number of engine addresses, in the order of the "
            f"engines, got {num_addresses}"
        )


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    """A front end of running engines takes the model as it is there."""
    names = [item.name for item in dataclasses.fields(AsyncEngineArgs)]
    for name in names:
        if hasattr(args, name) and name not in _OF_FRONT_ENDS:
            raise ConfigError(
                f"{name} is an engine setting, but --engine-address names an engine that already runs: pass it to the "
                "--headless process, or leave --engine-address out"
            )
