/* Loaded before the C library, this gives PyTorch memory that is aligned to 16 bytes, not to 64, and differently each time.
   Kernels treat the ends of a misaligned row apart, so sums are added up in another order. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

int posix_memalign(void **out, size_t alignment, size_t size)
{
    static int (*original)(void **, size_t, size_t);
    static unsigned state = 1;
    if (alignment != 64) {
        if (!original)
            original = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
        return original(out, alignment, size);
    }
    state = state * 1103515245u + 12345u; /* a race between threads only makes it more random */
    *out = malloc(size + 16 * (state >> 16 & 3));
    return *out ? 0 : ENOMEM;
}
