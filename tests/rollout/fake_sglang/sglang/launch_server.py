"""`python -m sglang.launch_server --config FILE`: SGLang's interface over a Llama in numpy, which starts at once.

Follows the definitions of SGLang 0.5.17: fields of /generate and of its streamed events (cumulative, or with only the
new tokens; every `stream_interval` tokens after the first), aborts, the weight, memory and cache endpoints, the key.
What the adapter sent is kept for the tests under /seen, with the number of events and of held requests (/hold).
"""

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

KNOWN = {
    "model-path", "load-format", "skip-tokenizer-init", "dtype", "tp-size", "max-running-requests",
    "chunked-prefill-size", "context-length", "random-seed", "enable-deterministic-inference", "device",
    "disable-cuda-graph", "host", "port", "api-key", "log-level",
}  # fmt: skip
SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos",
    "sampling_seed", "stream_interval",
}  # fmt: skip


class Llama:
    """Only what is needed for the logits behind the last token."""

    def __init__(self, config):
        self.config = config
        self.weights = {}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.heads
        rope = config.get("rope_parameters") or config
        self.frequencies = rope["rope_theta"] ** (-np.arange(0, self.size, 2) / self.size)

    def norm(self, x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def rotated(self, x):
        angles = np.arange(x.shape[1])[:, None] * self.frequencies
        cos, sin = (np.concatenate([part, part], -1) for part in (np.cos(angles), np.sin(angles)))
        first, second = np.split(x, 2, -1)
        return x * cos + np.concatenate([-second, first], -1) * sin

    def attention(self, x, layer):
        def heads(name, count):
            return self.linear(x, f"{layer}.{name}").reshape(len(x), count, self.size).swapaxes(0, 1)

        q, k = self.rotated(heads("q_proj", self.heads)), self.rotated(heads("k_proj", self.kv_heads))
        k, v = (np.repeat(t, self.heads // self.kv_heads, 0) for t in (k, heads("v_proj", self.kv_heads)))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(self.size)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ v
        return self.linear(mixed.swapaxes(0, 1).reshape(len(x), -1), f"{layer}.o_proj")

    def mlp(self, x, layer):
        gate = self.linear(x, f"{layer}.gate_proj")
        return self.linear(
            gate / (1 + np.exp(-gate)) * self.linear(x, f"{layer}.up_proj"), f"{layer}.down_proj"
        )

    def logits(self, ids):
        x = self.weights["model.embed_tokens.weight"][ids]
        for number in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = x + self.mlp(self.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        head = "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens"
        return self.linear(self.norm(x[-1], "model.norm"), head).astype(np.float64)


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class State:
    def __init__(self, arguments):
        self.arguments = arguments
        self.model = Llama(json.loads((Path(arguments["model-path"]) / "config.json").read_text()))
        self.lock = threading.Lock()
        self.seen = []
        self.changed = threading.Condition()
        self.running, self.aborted = set(), set()
        self.events = self.held = 0
        self.hold = None  # answers stop after so many tokens, until everything is aborted

    def generate(self, body):
        """Yields the events of a streamed answer."""
        with self.changed:
            if body["rid"] in self.running:
                raise ValueError(f"{body['rid']} is running already")
            self.running.add(body["rid"])
        ended = False
        try:
            for event in self.answer(body):
                ended = "error" in event or event["meta_info"]["finish_reason"] is not None
                if ended:
                    self.forget(body["rid"])  # before the client knows it: its name is free then
                yield event
        finally:
            if not ended:
                self.forget(body["rid"])

    def forget(self, rid):
        with self.changed:
            self.running.discard(rid)
            self.aborted.discard(rid)
            self.changed.notify_all()

    def abort(self, rid="", abort_all=False):
        with self.changed:
            if abort_all:
                self.hold = None
            self.aborted |= {name for name in self.running if abort_all or name.startswith(rid)}
            self.changed.notify_all()

    def may_go_on(self, rid, tokens):
        """False when the request was aborted."""
        with self.changed:
            self.held += 1
            self.changed.wait_for(
                lambda: rid in self.aborted or self.hold is None or tokens < self.hold, timeout=600
            )
            self.held -= 1
            return rid not in self.aborted

    def answer(self, body):
        """Like SGLang's, an event comes after token 1, 1 + stream_interval, ... and at the end."""
        params = body["sampling_params"]
        unknown = set(params) - SAMPLING
        if unknown:
            yield {"error": {"message": f"unexpected sampling parameters {sorted(unknown)}"}}
            return
        draw = np.random.default_rng(params["sampling_seed"])
        ids, rows, temperature = list(body["input_ids"]), [], params["temperature"]
        reason, sent, interval = None, 0, params.get("stream_interval") or 1
        while reason is None:
            if self.may_go_on(body["rid"], len(rows)):
                reason = self.draw(ids, rows, params, draw, temperature)
            else:
                reason = {"type": "abort", "message": "Aborted"}
            if reason is None and len(rows) % interval != 1 % interval:
                continue
            first = sent if body.get("incremental_streaming_output") else 0
            meta = {"id": body["rid"], "finish_reason": reason, "completion_tokens": len(rows)}
            meta["output_token_logprobs"] = rows[first:]
            sent, self.events = len(rows), self.events + 1
            yield {"output_ids": [row[1] for row in rows[first:]], "meta_info": meta}

    def draw(self, ids, rows, params, draw, temperature):
        """One more token; why it ends the answer, or None."""
        with self.lock:
            logits = self.model.logits(ids)
        scaled = log_softmax(logits if temperature == 0 else logits / temperature)
        original = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") == "1"
        token = int(logits.argmax() if temperature == 0 else draw.choice(len(logits), p=np.exp(scaled)))
        ids.append(token)
        rows.append([float((log_softmax(logits) if original else scaled)[token]), token, None])
        if token in params["stop_token_ids"]:
            return {"type": "stop", "matched": token}
        if len(rows) >= params["max_new_tokens"]:
            return {"type": "length", "length": len(rows)}
        return None

    def update(self, body):
        weights = {}
        if (
            body.get("load_format") != "safetensors"
            or not (Path(body["model_path"]) / "config.json").exists()
        ):
            return {"success": False, "message": "no such format or folder", "num_paused_requests": 0}
        for path in sorted(Path(body["model_path"]).glob("*.safetensors")):
            weights.update(load_file(path))
        fault = os.environ.get("FAKE_SGLANG_FAULT")
        if fault == "corrupt":
            weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
        if fault == "stale" and body["weight_version"] != "0":
            del weights["model.layers.0.mlp.up_proj.weight"]
        if body.get("abort_all_requests"):
            self.abort(abort_all=True)
        with self.changed:
            if not self.changed.wait_for(lambda: not self.running, timeout=600):
                return {"success": False, "message": "requests are running", "num_paused_requests": 0}
        with self.lock:
            if fault == "refuse":
                return {"success": False, "message": "out of memory", "num_paused_requests": 0}
            self.model.weights.update(weights)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args):
        pass

    def reply(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.headers.get("Authorization") != f"Bearer {self.state.arguments['api-key']}":
            self.reply({"error": "Unauthorized"}, 401)
        elif self.path == "/health":
            self.reply({})
        elif self.path == "/seen":
            with self.state.changed:
                counts = {"events": self.state.events, "held": self.state.held}
            self.reply({"calls": self.state.seen, "arguments": self.state.arguments, **counts})
        else:
            self.reply({"error": "not found"}, 404)

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or "{}")
        if self.headers.get("Authorization") != f"Bearer {self.state.arguments['api-key']}":
            self.reply({"error": "Unauthorized"}, 401)
            return
        self.state.seen.append([self.path, {k: v for k, v in body.items() if k != "input_ids"}])
        if self.path == "/generate":
            self.stream(body)
        elif self.path == "/hold":  # for tests
            with self.state.changed:
                self.state.hold = body["tokens"]
                self.state.changed.notify_all()
            self.reply({})
        elif self.path == "/abort_request":
            self.state.abort(**body)
            self.reply({})
        elif self.path == "/update_weights_from_disk":
            answer = self.state.update(body)
            self.reply(answer, 200 if answer["success"] else 400)
        elif self.path == "/get_weights_by_name":
            self.reply(self.state.model.weights[body["name"]][: body["truncate_size"]].tolist())
        elif self.path in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
            self.reply({})
        else:
            self.reply({"error": "not found"}, 404)

    def stream(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for event in self.state.generate(body):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.close_connection = True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    arguments = json.loads(Path(parser.parse_args().config).read_text())
    unknown = set(arguments) - KNOWN
    if unknown:
        sys.exit(f"launch_server.py: error: unrecognized arguments: {sorted(unknown)}")
    Handler.state = State(arguments)
    ThreadingHTTPServer.request_queue_size = 1024
    ThreadingHTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()
