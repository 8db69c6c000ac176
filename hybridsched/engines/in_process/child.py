"""The other side of `VllmProcessEngine`: a `vllm.LLM` driven step by step, with commands in and results out.

Run as a file by the Python of an environment that has vLLM, which need not have hybridsched: nothing of this
package is imported here, and nothing of the package imports this. JSON lines come on stdin; answers leave on
what was stdout, while stdout itself becomes stderr, where vLLM and its libraries may write what they like.

Commands are taken in between two steps, so a pause or an abort takes effect at the iteration boundary, and
what a request had produced by then is with the other side before the command is answered.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

_DEFAULT_COMPLETION_TOKENS = 16
_END = object()


class RefusedError(Exception):
    """A request or a command that cannot be done, in the words of vLLM's HTTP API."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Running:
    """One request in the engine, or one held back by a pause."""

    def __init__(self, order: dict[str, Any], prompt: list[int]) -> None:
        self.order = order
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.sent = 0
        """Tokens that have gone out already, where it streams."""
        self.sent_text = 0
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.cached_tokens: int | None = None
        self.embedding: list[float] | None = None


class Child:
    """Runs one `vllm.LLM`."""

    def __init__(self, settings: dict[str, Any], out: Any) -> None:
        from vllm import LLM, PoolingParams, SamplingParams

        self._out = out
        self._sampling, self._pooling = SamplingParams, PoolingParams
        self._llm = LLM(disable_log_stats=False, **settings)
        self._engine = self._llm.llm_engine
        self._tokenizer = self._llm.get_tokenizer()
        self._max_model_len = int(self._engine.vllm_config.model_config.max_model_len)
        self._vocabulary = int(self._engine.vllm_config.model_config.get_vocab_size())
        self._pools = settings.get("runner") == "pooling"
        self._running: dict[str, Running] = {}
        self._held: list[Running] = []
        """Requests that came during a pause."""
        self._paused = False
        self._asleep = False
        self._unsettled = False
        """Requests were ended since the last step, which sets the gauges and lets go of their blocks."""
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()

    # -- the loop

    def run(self) -> None:
        """Until stdin ends."""
        threading.Thread(target=self._read, daemon=True).start()
        self._say({"ready": True, "max_model_len": self._max_model_len, "pools": self._pools})
        while True:
            busy = self._has_work()
            while True:
                try:
                    order = self._commands.get(block=not busy)
                except queue.Empty:
                    break
                if order is _END:
                    return
                self._obey(order)
                busy = self._has_work()
            if busy:
                self._step()

    def _has_work(self) -> bool:
        return not self._paused and (self._unsettled or bool(self._engine.has_unfinished_requests()))

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._commands.put(json.loads(line))
        self._commands.put(_END)

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        self._out.flush()

    def _obey(self, order: dict[str, Any]) -> None:
        do = order["do"]
        try:
            if do in ("complete", "embed"):
                self._take(order)
                return
            value = getattr(self, f"do_{do}")(order)
            self._say({"call": order["call"], "value": value})
        except RefusedError as error:
            self._refuse(order, error)
        except Exception as error:  # noqa: BLE001 - what vLLM refuses is the request's fault
            self._refuse(order, RefusedError(str(error)))

    def _refuse(self, order: dict[str, Any], error: RefusedError) -> None:
        told = {"error": {"message": str(error), "param": error.param}}
        self._say({"id": order["id"], **told} if "id" in order else {"call": order["call"], **told})

    def _step(self) -> None:
        self._unsettled = False
        for output in self._engine.step():
            running = self._running.get(output.request_id)
            if running is not None:
                self._note(running, output)
        for running in list(self._running.values()):
            if running.finish_reason is not None:
                del self._running[running.order["id"]]
                self._tell(running)
            elif running.order.get("stream") and len(running.token_ids) > running.sent:
                self._tell(running)

    def _note(self, running: Running, output: Any) -> None:
        if getattr(output, "num_cached_tokens", None) is not None:
            running.cached_tokens = output.num_cached_tokens
        if self._pools:
            if output.finished:
                running.embedding = output.outputs.data.tolist()
                running.finish_reason = "stop"
            return
        for part in output.outputs:  # each output holds what is new (DELTA)
            running.token_ids += part.token_ids
            running.text += part.text
            running.finish_reason = part.finish_reason
            running.stop_reason = part.stop_reason

    def _tell(self, running: Running) -> None:
        """What is new of a request; all of it with its end."""
        self._say(
            {
                "id": running.order["id"],
                "prompt_token_ids": running.prompt if not running.sent else None,
                "token_ids": running.token_ids[running.sent :],
                "text": running.text[running.sent_text :],
                "finish_reason": running.finish_reason,
                "stop_reason": running.stop_reason,
                "cached_tokens": running.cached_tokens,
                "embedding": running.embedding,
            }
        )
        running.sent, running.sent_text = len(running.token_ids), len(running.text)

    # -- requests

    def _take(self, order: dict[str, Any]) -> None:
        if (order["do"] == "embed") is not self._pools:
            what = "Embeddings" if order["do"] == "embed" else "Completions"
            raise RefusedError(f"The model does not support {what} API")
        running = Running(order, self._prompt(order))
        self._check(running)
        if self._paused:
            self._held.append(running)
            return
        self._start(running)

    def _check(self, running: Running) -> None:
        room = self._max_model_len - len(running.prompt)
        if not self._pools:
            if room < 1:
                raise RefusedError(
                    f"This model's maximum context length is {self._max_model_len} tokens. However, your "
                    f"request has {len(running.prompt)} input tokens. Please reduce the length of the input "
                    "messages.",
                    param="input_tokens",
                )
            params = running.order["params"]
            asked = params.get("max_tokens")
            if asked is None:
                params["max_tokens"] = (
                    min(room, _DEFAULT_COMPLETION_TOKENS) if running.order["short"] else room
                )
            elif type(asked) is int and asked > room:
                raise RefusedError(
                    f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum "
                    f"context length is {self._max_model_len} tokens and your request has "
                    f"{len(running.prompt)} input tokens.",
                    param="max_tokens",
                )
        elif room < 0:
            raise RefusedError(
                f"{len(running.prompt)} input tokens, of at most {self._max_model_len}", param="input"
            )

    def _start(self, running: Running) -> None:
        order = running.order
        if self._pools:
            params = self._pooling(task="embed", **order["params"])
        else:
            from vllm.sampling_params import RequestOutputKind

            params = self._sampling(**order["params"], output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(
            order["id"], {"prompt_token_ids": running.prompt}, params, priority=order["priority"]
        )
        self._running[order["id"]] = running

    def _prompt(self, order: dict[str, Any]) -> list[int]:
        """Token ids of what the order gives: ids, text, or messages under the model's chat template."""
        if order.get("messages") is not None:
            kwargs = order.get("template_kwargs") or {}
            ids = self._tokenizer.apply_chat_template(
                order["messages"],
                tokenize=True,
                return_dict=False,
                **{"add_generation_prompt": True, **kwargs},
            )
        elif isinstance(order["prompt"], str):
            ids = self._tokenizer.encode(order["prompt"], add_special_tokens=order["add_special_tokens"])
        else:
            ids = order["prompt"]
            highest = self._vocabulary
            if bad := [i for i in ids if type(i) is not int or not 0 <= i < highest]:
                raise RefusedError(
                    f"Token id {bad[0]!r} is out of vocabulary (0 to {highest - 1})", param="prompt"
                )
        if not ids:
            raise RefusedError("the prompt holds no tokens", param="prompt")
        return list(ids)

    # -- commands

    def do_abort(self, order: dict[str, Any]) -> int:
        """End requests by id; their tokens so far go out with finish_reason abort."""
        ended = 0
        for request_id in order["ids"]:
            running = self._running.pop(request_id, None)
            if running is not None:
                self._engine.abort_request([request_id])
                self._unsettled = True
            else:
                held = [one for one in self._held if one.order["id"] == request_id]
                if not held:
                    continue
                running = held[0]
                self._held.remove(running)
            running.finish_reason = "abort"
            self._tell(running)
            ended += 1
        return ended

    def do_pause(self, _order: dict[str, Any]) -> None:
        self._paused = True

    def do_resume(self, _order: dict[str, Any]) -> None:
        self._paused = False
        held, self._held = self._held, []
        for running in held:
            try:
                self._start(running)
            except Exception as error:  # noqa: BLE001 - as in `_obey`
                self._refuse(running.order, RefusedError(str(error)))

    def do_stands_still(self, _order: dict[str, Any]) -> bool:
        return self._paused or self._asleep

    def do_can_sleep(self, _order: dict[str, Any]) -> bool:
        return bool(self._engine.vllm_config.model_config.enable_sleep_mode)

    def do_sleep(self, order: dict[str, Any]) -> float:
        """Free the memory; returns the seconds it took. Requests stay as they are and recompute after
        waking."""
        if not self.do_can_sleep(order):
            raise RefusedError("this engine was not started with sleep mode, or its platform has none")
        began = time.monotonic()
        self._paused = True
        self._llm.sleep(level=order["level"])
        self._asleep = True
        return time.monotonic() - began

    def do_wake(self, order: dict[str, Any]) -> float:
        began = time.monotonic()
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        self.do_resume(order)
        return time.monotonic() - began

    def do_tokenize(self, order: dict[str, Any]) -> list[int]:
        return self._prompt(order)

    def do_detokenize(self, order: dict[str, Any]) -> str:
        return str(self._tokenizer.decode(order["ids"]))

    def do_metrics(self, _order: dict[str, Any]) -> str:
        """What the server's /metrics would say."""
        from prometheus_client import generate_latest

        return generate_latest().decode()


def main() -> int:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        child = Child(json.loads(sys.stdin.buffer.readline()), out)
    except Exception as error:  # noqa: BLE001 - whatever keeps it from starting is told
        out.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        out.flush()
        return 1
    child.run()
    # What libraries do at an orderly exit takes seconds, and frees nothing that the end of the process does
    # not.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
