"""Faults planted into layer and worker: what random programs must find, and hostile clients."""

from __future__ import annotations

from tests.harness.driver.natives import Changes

AT_ONCE = """\
    if (todo->kind == KIND) {
        todo->next = NULL;
        do_all(s, todo);
        return;
    }
    m->waited |= todo->kind == WW_ANSWER"""
ARGS, FINISH = "        memcpy(p.entry + 1, &args, sizeof args);\n", "        error = ww_finish(&p);\n"

PLANTED: dict[str, Changes] = {
    "waits for events are dropped": {
        "worker_streams.c": {
            "code = call->generation->recorded ? native.cuStreamWaitEvent(s->native, call->generation->native, 0)"
            " : CUDA_SUCCESS;": "code = CUDA_SUCCESS;"
        }
    },
    "a wait does not wait until its record is issued": {
        "worker_streams.c": {"call->entry.op == WW_OP_STREAM_WAIT && call->generation->parked": "0"}
    },
    "a record takes the generation that others wait for": {"worker_streams.c": {"if (g->refs > 1) {": "if (0) {"}},
    "a legacy call passes parked calls of blocking streams": {
        "worker_streams.c": {"p->first->order < call->order) return 0;": "p->first->order < call->order) return 1;"}
    },
    "a blocking stream's call passes parked legacy calls": {
        "worker_streams.c": {"} else if (!s->nonblocking && legacy->first && legacy->first->order": "} else if (0 && 0"}
    },
    "a place is given back when the copy is issued": {
        "worker_streams.c": {"    m->waited |= todo->kind == WW_ANSWER": AT_ONCE.replace("KIND", "WW_PLACE")}
    },
    "a cell is given back when the copy is issued": {
        "worker_streams.c": {
            "void ww_stream_later(struct ww_stream *s, struct ww_todo todo) {": """\
void ww_stream_later(struct ww_stream *s, struct ww_todo todo) {
    if (todo.kind == WW_CELL) {
        do_one(s, &todo);
        return;
    }"""
        }
    },
    "what no mark covers counts as done": {
        "worker_streams.c": {"    if (s->done == s->issued && !s->first_mark) {": "    if (!s->first_mark) {"}
    },
    "a synchronization answers when it is read": {
        "worker_streams.c": {"    m->waited |= todo->kind == WW_ANSWER": AT_ONCE.replace("KIND", "WW_ANSWER")}
    },
    "memory that is freed is used again at once": {
        "worker_memory.c": {"    if (!ngroup) start_group();": "    ww_arena_free(&ww_arena, frees[--nfrees]);"}
    },
    "work of destroyed streams is not waited for": {
        "worker_streams.c": {"if (s->gone ? !s->first_mark :": "if (s->gone ? 1 :"}
    },
    "an entry is published before it is whole": {"layer_copy.c": {f"{ARGS}{FINISH}    }}": f"{FINISH}{ARGS}    }}"}},
    "a place is filled while its last copy is under way": {
        "layer_ring.c": {"c->place_held[*place] = true;": "c->place_held[*place] = false;"}
    },
    "calls pass a host function of the legacy stream": {
        "layer_host.c": {" || (h->stream == WW_LEGACY && is_blocking(d, stream));": ";"}
    },
    "a host function runs when it is posted": {
        "layer_host.c": {"if (*code != CUDA_ERROR_NOT_READY)": "if ((*code %= CUDA_ERROR_NOT_READY) >= 0)"}
    },
    "a wait for another device's event is dropped": {
        "layer_peer.c": {"error ? error : ww_send(d, WW_OP_AWAIT": "error || &stream ? error : ww_send(d, WW_OP_AWAIT"}
    },
    "another device is told of an event before it has been passed": {
        "worker_streams.c": {"    else wait_for(g, todo);": "    else do_one(NULL, &todo), (void)wait_for;"}
    },
    "another device is told of an event before its record is issued": {
        "worker_streams.c": {"if (!g || !g->recorded) do_one": "if (!g || !g->recorded || g->parked) do_one"}
    },
    "new memory is granted before other devices have it": {
        "worker_memory.c": {"job->result = ww_links_add(job->a, job->b, handle);": ";"}
    },
    "the ring's end is not padded": {"layer_ring.c": {"if (size > rest) {": "if (size > rest + 64) {"}},
}
"""Name of a fault -> the change that plants it."""

PEERS: dict[str, tuple[str, Changes]] = {
    "a synchronous copy between devices passes the other's legacy stream": (
        "synchronous",
        {"layer_copy.c": {"k->waits ? stream_done(ends[i], WW_LEGACY) : ww_context_code(ends[i]);": "0;"}},
    ),
    "a synchronous copy to memory that others use is not waited for": (
        "synchronous", {"layer_copy.c": {"|| atomic_load_explicit(&k->device->shared, memory_order_relaxed);": ";"}},
    ),
    "a free does not wait for the other device": (
        "frees", {"layer_memory.c": {"    ww_peers_done(d);\n": ""}},
    ),
    "memory is given back while others have it mapped": (
        "comes_back", {"worker_memory.c": {"    ww_links_drop(job->a, job->b);\n": ""}},
    ),
    "who waits for a worker that has ended is not told": (
        "lost", {"worker_links.c": {"a->came = 1;\n        a->result": "a->result"}},
    ),
    "memory of a worker that has ended goes while it is used": (
        "lost", {"worker_links.c": {"    ww_barrier((struct": "    start_forget(&(struct"}},
    ),
}  # fmt: skip
"""The same, and the act of peer_acts.py that finds it."""
