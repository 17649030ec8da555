/* A driver without a GPU, for tests. */
#include "fake.h"
#include "gen_calls.h"

#include <stdio.h>
#include <stdlib.h>

int fake_absent(const char *symbol)
{
    const char *path = getenv("FAKE_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s\n", symbol);
        fclose(log);
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}
