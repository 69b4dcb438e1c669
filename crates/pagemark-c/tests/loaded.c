/* Loads the library that the argument names while the program runs, as an interpreter does, and makes a region by it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    int (*make)(size_t, const void *, void **);
    void *region = NULL;

    if (library == NULL) {
        fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "which library?");
        return 1;
    }
    *(void **)&make = dlsym(library, "pagemark_region_new");
    if (make == NULL || make(4096, NULL, &region) != 0 || region == NULL) {
        fprintf(stderr, "no region\n");
        return 1;
    }
    /* Signals and forks call it when nobody uses it any more, too. */
    if (dlclose(library) != 0 || dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD) == NULL) {
        fprintf(stderr, "the library was unloaded\n");
        return 1;
    }
    puts("loaded");
    return 0;
}
