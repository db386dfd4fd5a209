/* Loaded before the C library, this gives PyTorch's tensors memory that is aligned to 16 bytes, not to 64, and differently each
   time. Kernels treat the ends of a misaligned row apart, so sums are added up in another order. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Only the allocator of tensors, in libc10: the workspace of a kernel must be aligned as it asked, else it crashes. dladdr looks at
   every symbol of a library, so the few places that ask are remembered. */
static int for_tensors(void *caller)
{
    static struct { void *caller; int yes; } known[64];
    unsigned i;
    Dl_info library;
    for (i = 0; i < 63 && known[i].caller; i++)
        if (known[i].caller == caller)
            return known[i].yes;
    known[i].yes = dladdr(caller, &library) && strstr(library.dli_fname, "libc10.");
    known[i].caller = caller;
    return known[i].yes;
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
    static int (*original)(void **, size_t, size_t);
    static unsigned state = 1;
    if (alignment != 64 || !for_tensors(__builtin_return_address(0))) {
        if (!original)
            original = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
        return original(out, alignment, size);
    }
    state = state * 1103515245u + 12345u; /* a race between threads only makes it more random */
    *out = malloc(size + 16 * (state >> 16 & 3));
    return *out ? 0 : ENOMEM;
}
