/* What the tests in C expect of a call. main() returns whether there were `failures`. */
#include <pagemark.h>

#include <stdio.h>
#include <string.h>

static int failures;

static void expect(int line, pagemark_status status, pagemark_status expected, const char *said)
{
    if (status != expected) {
        fprintf(stderr, "line %d: status %d, not %d: %s\n", line, (int)status, (int)expected, pagemark_last_error());
        failures++;
    } else if (said && !strstr(pagemark_last_error(), said)) {
        fprintf(stderr, "line %d: the error does not speak of \"%s\": %s\n", line, said, pagemark_last_error());
        failures++;
    }
}

static void expect_true(int line, int is_true, const char *what)
{
    if (!is_true) {
        fprintf(stderr, "line %d: not so: %s\n", line, what);
        failures++;
    }
}

#define FAILS(call, status, said) expect(__LINE__, (call), PAGEMARK_STATUS_##status, said)
#define WORKS(call) expect(__LINE__, (call), PAGEMARK_STATUS_OK, NULL)
#define TRUE(what) expect_true(__LINE__, (what), #what)
