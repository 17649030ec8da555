/* Two more threads, for driver calls that may block. Each makes its calls in order. The second thread makes the calls
 * that wait for all work of the device (unpin): if a stream never becomes idle, they never return. The first thread
 * makes all other calls (load, unload, map, pin, queries).
 */
#include "worker.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lane {
    pthread_cond_t some;
    struct ww_job *wanted, **end;
} lanes[2] = {{PTHREAD_COND_INITIALIZER, NULL, &lanes[0].wanted}, {PTHREAD_COND_INITIALIZER, NULL, &lanes[1].wanted}};
static struct ww_job *done, **done_end = &done;
static _Atomic int any_done;
static uint32_t jobs; /* used by the executor alone: jobs whose `done` has not been called */

#define JOBS_MOST                                                                                                      \
    70000u /* a correct client waits for one job in each slot; of the jobs without a slot only UNPINs are many */

static void *work(void *its) {
    struct lane *lane = its;
    CUresult code = native.cuCtxSetCurrent(ww.context);
    if (code)
        ww_die("another thread cannot enter the context");
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!lane->wanted)
            pthread_cond_wait(&lane->some, &lock);
        struct ww_job *job = lane->wanted;
        lane->wanted = job->next;
        if (!lane->wanted)
            lane->end = &lane->wanted;
        pthread_mutex_unlock(&lock);
        job->work(job);
        fflush(stdout);
        job->next = NULL;
        pthread_mutex_lock(&lock);
        *done_end = job;
        done_end = &job->next;
        atomic_store(&any_done, 1);
        pthread_mutex_unlock(&lock);
        ww_wake();
    }
    return NULL;
}

void ww_heavy_start(void) {
    pthread_t thread;
    for (int i = 0; i < 2; i++) {
        if (pthread_create(&thread, NULL, work, lanes + i))
            ww_die("there is no thread for calls that wait");
        pthread_detach(thread);
    }
}

void ww_heavy(struct ww_job wish) {
    if (++jobs > JOBS_MOST)
        ww_die("more calls wait than a client can have");
    struct ww_job *job = ww_memory(sizeof *job);
    struct lane *lane = lanes + (wish.waits != 0);
    *job = wish;
    pthread_mutex_lock(&lock);
    *lane->end = job;
    lane->end = &job->next;
    pthread_cond_signal(&lane->some);
    pthread_mutex_unlock(&lock);
}

CUresult ww_heavy_for(const struct ww_call *call, struct ww_job job) {
    job.slot = call->entry.slot;
    job.seq = call->entry.seq;
    ww_heavy(job);
    return WW_LATER;
}

void ww_heavy_behind(const struct ww_barrier *barrier, struct ww_job job) {
    job.slot = barrier->slot;
    job.seq = barrier->seq;
    ww_heavy(job);
}

int ww_heavy_step(void) {
    if (!atomic_load(&any_done))
        return 0;
    pthread_mutex_lock(&lock);
    struct ww_job *list = done;
    done = NULL;
    done_end = &done;
    atomic_store(&any_done, 0);
    pthread_mutex_unlock(&lock);
    while (list) {
        struct ww_job *job = list;
        list = job->next;
        jobs--;
        ww_living(job->result);
        if (job->done)
            job->done(job);
        else
            ww_answer(job->slot, job->seq, job->result, job->data, job->nbytes);
        free(job->data);
        free(job->call);
        free(job);
    }
    return 1;
}
