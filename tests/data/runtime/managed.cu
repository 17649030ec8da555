// Managed variables: the program reads and writes them without calls.
#include "check.h"

#include <cuda_runtime.h>

__managed__ unsigned numbers[256];
__managed__ unsigned single = 5;

int main() {
    EQUAL(single, 5);
    single = 6;
    fill<<<1, 32>>>(numbers, 256, 40);
    OK(cudaDeviceSynchronize());
    EQUAL(numbers[255], 40);
    numbers[7] = 1;
    add<<<1, 32>>>(numbers, numbers, 256);
    OK(cudaDeviceSynchronize());
    CHECK(numbers[6] == 80 && numbers[7] == 2 && single == 6);
    void *address;
    OK(cudaGetSymbolAddress(&address, numbers));
    CHECK(address == numbers);
    puts("passed");
    return 0;
}
