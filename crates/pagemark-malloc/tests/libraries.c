/*
 * libraries DIRECTORY COUNT: loads DIRECTORY/0.so to DIRECTORY/COUNT-1.so, each with variables of
 * threads, while threads that are older allocate, and use these variables. Prints "right".
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 256, THREADS = 3 };

typedef long touch(long);

static touch *loaded[MOST];
static atomic_int loaded_count, checked[THREADS], is_over;

static long allocate(long value)
{
	size_t bytes = 16 + value % 5000;
	char *object = malloc(bytes);

	if (!object)
		abort();
	memset(object, (int)value, bytes);
	if (object[bytes - 1] != (char)value)
		abort();
	free(object);
	return value;
}

static void check(long *calls)
{
	int count = atomic_load(&loaded_count);

	++*calls;
	for (int i = 0; i < count; i++) {
		if (loaded[i](allocate(*calls)) != *calls)
			abort();
	}
}

static void *work(void *number)
{
	long calls = 0;

	while (!atomic_load(&is_over)) {
		int count = atomic_load(&loaded_count);

		check(&calls);
		atomic_store((atomic_int *)number, count);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	int count = argc == 3 ? atoi(argv[2]) : 0;
	long calls = 0;

	if (count < 1 || count > MOST)
		return 2;
	for (int i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, work, &checked[i]);
	for (int i = 0; i < count; i++) {
		char path[4096];
		void *library;

		snprintf(path, sizeof path, "%s/%d.so", argv[1], i);
		library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
		allocate(i);
		if (!library || !(loaded[i] = (touch *)dlsym(library, "touch"))) {
			fprintf(stderr, "%s\n", dlerror());
			return 1;
		}
		atomic_store(&loaded_count, i + 1);
		check(&calls);
	}
	/* Each thread has used the variables of all libraries. */
	for (int i = 0; i < THREADS; i++) {
		while (atomic_load(&checked[i]) < count)
			;
	}
	atomic_store(&is_over, 1);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	puts("right");
	return 0;
}
