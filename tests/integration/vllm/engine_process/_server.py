"""One vLLM engine, driven by lines of JSON.

A command is ``{"do": NAME, ...arguments}``, its reply ``{"value": ...}`` or ``{"error": {"type",
"message"}}``. Everything that vLLM prints goes to the process's own output. The engine core runs
in this process unless ``processes`` is set at the start, so that tests can take single steps.

Only one thread: commands are carried out one after the other.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ._models import build_model

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["serve"]

_BLOCK_TOKENS: Final = 32


def serve(*, commands: int, replies: int) -> int:
    """Carry out commands until the pipe ends or ``stop`` is asked for.

    Args:
        commands: Descriptor from which commands are read.
        replies: Descriptor to which replies are written.

    Returns:
        The exit status.
    """
    # The engine's own processes must not keep the pipes open when this one is killed.
    os.set_inheritable(commands, False)
    os.set_inheritable(replies, False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    engine = _Engine()
    with os.fdopen(commands, "r") as requests, os.fdopen(replies, "w") as answers:
        for line in requests:
            command = json.loads(line)
            name = command.pop("do")
            try:
                answer = {"value": engine.call(name, command)}
            except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
                traceback.print_exc()
                answer = {"error": {"type": type(error).__name__, "message": str(error)}}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if name == "stop":
                break
    return 0


@final
class _Engine:
    """The engine and what can be asked of it. Public methods are the commands."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._processes = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        self._outputs: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Carry out a command."""
        commands: dict[str, Callable[..., Any]] = {
            "start": self.start,
            "generate": self.generate,
            "submit": self.submit,
            "step": self.step,
            "finish": self.finish,
            "abort": self.abort,
            "settle": self.settle,
            "loading": self.loading,
            "reset": self.reset,
            "metrics": self.metrics,
            "events": self.events,
            "stop": self.stop,
        }
        return commands[name](**arguments)

    def start(
        self,
        *,
        model: str,
        models: str,
        connector: dict[str, Any] | None,
        options: dict[str, Any],
        events: bool = False,
    ) -> dict[str, Any]:
        """Make the engine.

        Args:
            model: The kind of model, see :mod:`engine_process._models`.
            models: The folder where models are kept.
            connector: vLLM's ``KVTransferConfig`` as a dictionary, or none.
            options: More of vLLM's engine arguments.
            events: Whether vLLM publishes the events of its caches: see :meth:`events`.

        Returns:
            The seconds it took, and vLLM's view of its own configuration.
        """
        begin = time.monotonic()
        # Seconds, and a fault in it should be a reply.
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "load_format": "auto",
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": _BLOCK_TOKENS,
            "seed": 0,
            "enable_prefix_caching": True,
            "max_model_len": 2048,
            # The least that can be asked for in bytes is a GiB, and takes a second to clear.
            "num_gpu_blocks_override": 1024,
            "disable_log_stats": False,
        }
        arguments |= options
        if arguments.get("async_scheduling"):
            _allow_async_scheduling()
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        if events:
            arguments["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="null"
            )
        self._llm = LLM(model=str(build_model(Path(models), model)), **arguments)
        if events:
            # Where a publisher would put them on a socket.
            self._scheduler.kv_event_publisher.publish = self._publish
        config = self._llm.llm_engine.vllm_config
        return {
            "seconds": time.monotonic() - begin,
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "world_size": config.parallel_config.world_size,
        }

    def generate(
        self, *, prompts: list[list[int]], max_tokens: int = 16, margins: bool = False
    ) -> dict[str, Any]:
        """Answer prompts, all at once.

        Args:
            prompts: Token ids.
            max_tokens: How many tokens each answer has.
            margins: Whether to tell how far the best token was ahead of the second.
        """
        begin, processor_begin = time.monotonic(), time.process_time()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            _sampling(max_tokens, logprobs=2 if margins else None),
            use_tqdm=False,
        )
        reply: dict[str, Any] = {
            "seconds": time.monotonic() - begin,
            "processor_seconds": time.process_time() - processor_begin,
            "answers": [_answer(output) for output in outputs],
        }
        if margins:
            reply["margin"] = min(
                _margin(step) for output in outputs for step in output.outputs[0].logprobs
            )
        return reply

    def submit(self, *, prompts: list[list[int]], max_tokens: int = 16) -> list[str]:
        """Queue prompts without a step; return the ids of their requests."""
        names = []
        for prompt in prompts:
            # vLLM makes a name of its own of it, which is the one it goes by inside.
            given = f"request-{len(self._names)}"
            self._names[given] = self._llm.llm_engine.add_request(
                given, {"prompt_token_ids": prompt}, _sampling(max_tokens)
            )
            names.append(self._names[given])
        return names

    def step(self, *, count: int = 1) -> list[str]:
        """Take steps; return the ids of requests that ended."""
        ended = []
        for _ in range(count):
            for output in self._llm.llm_engine.step():
                if output.finished:
                    name = self._names[output.request_id]
                    self._outputs[name] = output
                    ended.append(name)
        return ended

    def finish(self, *, deadline_s: float = 100.0) -> dict[str, Any]:
        """Take steps until all requests have ended; return the answers by id."""
        end = time.monotonic() + deadline_s
        while self._llm.llm_engine.has_unfinished_requests():
            if time.monotonic() > end:
                raise TimeoutError(f"requests are unfinished after {deadline_s} s")
            self.step()
        answers = {name: _answer(output) for name, output in self._outputs.items()}
        self._outputs.clear()
        return answers

    def abort(self, *, requests: list[str]) -> None:
        """End requests early."""
        self._llm.llm_engine.abort_request(requests, internal=True)

    def settle(self, *, deadline_s: float = 120.0) -> int:
        """Take steps while the engine or the connector has work; return how many.

        An engine in a process of its own steps by itself, and is waited for.
        """
        core = self._llm.llm_engine.engine_core
        end = time.monotonic() + deadline_s
        steps = 0
        while core.call_utility("has_work") if self._processes else self._scheduler.has_requests():
            if time.monotonic() > end:
                raise TimeoutError(f"the engine has work after {deadline_s} s and {steps} steps")
            if not self._processes:
                self.step()
            steps += 1
            # Nothing to compute: the disk should have the processor.
            time.sleep(0.001)
        return steps

    def loading(self) -> list[str]:
        """Return the requests that wait for a load into the engine's own cache."""
        return [
            name
            for name, request in self._scheduler.requests.items()
            if request.status.name == "WAITING_FOR_REMOTE_KVS"
        ]

    def reset(self, *, running: bool = False, connector: bool = False) -> bool:
        """Forget the engine's own cache, and on request that of the connector."""
        return bool(
            self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        )

    def metrics(self) -> dict[str, float]:
        """Return every sample of vLLM's metrics, ``name{label,...}`` without vLLM's own labels."""
        import prometheus_client  # type: ignore[import-not-found,unused-ignore]  # vLLM needs it

        samples: dict[str, float] = {}
        for family in prometheus_client.REGISTRY.collect():
            for sample in family.samples:
                labels = [
                    value
                    for name, value in sorted(sample.labels.items())
                    if name not in {"engine", "model_name"}
                ]
                name = f"{sample.name}{{{','.join(labels)}}}" if labels else sample.name
                samples[name] = samples.get(name, 0.0) + sample.value
        return samples

    def events(self) -> list[dict[str, Any]]:
        """Return the events that vLLM has published since the last call."""
        taken, self._events = self._events, []
        return taken

    def _publish(self, batch: Any) -> None:
        self._events += [
            {
                "kind": type(event).__name__,
                "medium": getattr(event, "medium", None),
                "blocks": len(getattr(event, "block_hashes", ())),
            }
            for event in batch.events
        ]

    def stop(self) -> None:
        """Shut the engine down as an operator would."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler


def _allow_async_scheduling() -> None:
    """Let asynchronous scheduling be, which vLLM switches off on the CPU as not worth it there."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def _sampling(max_tokens: int, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
    )


def _answer(output: Any) -> dict[str, Any]:
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens or 0,
    }


def _margin(step: dict[int, Any]) -> float:
    best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return float(best - second)
