// A library that counts how often it is loaded on the way to a program.
#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void loaded(void)
{
	char text[16];
	const char *before = getenv("LOADED");
	snprintf(text, sizeof text, "%d", (before ? atoi(before) : 0) + 1);
	setenv("LOADED", text, 1);
}
