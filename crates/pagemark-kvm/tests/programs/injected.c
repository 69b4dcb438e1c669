// A library that says that it was loaded.
#include <stdlib.h>

__attribute__((constructor)) static void loaded(void)
{
	setenv("INJECTED", "yes", 1);
}
