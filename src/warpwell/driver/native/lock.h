/* Mutexes that are held until the end of a block. */
#ifndef WW_LOCK_H
#define WW_LOCK_H

#include <pthread.h>

static inline pthread_mutex_t *ww_locked(pthread_mutex_t *mutex) {
    pthread_mutex_lock(mutex);
    return mutex;
}

static inline void ww_unlock(pthread_mutex_t **mutex) { pthread_mutex_unlock(*mutex); }

/* Hold the mutex until the block ends, also by a return. */
#define WW_LOCK(mutex) __attribute__((cleanup(ww_unlock), unused)) pthread_mutex_t *ww_held = ww_locked(mutex)

#endif
