/* What the tests in C++ expect of a call. main() returns whether there were `failures`. */
#include <pagemark.hpp>

#include <cstdio>
#include <cstring>

static int failures;

static void expect_true(int line, bool is_true, const char *what)
{
    if (!is_true) {
        std::fprintf(stderr, "line %d: not so: %s\n", line, what);
        failures++;
    }
}

#define TRUE(what) expect_true(__LINE__, (what), #what)

template <class Call> static void expect_thrown(int line, pagemark_status status, const char *said, Call call)
{
    try {
        call();
        expect_true(line, false, "it throws");
    } catch (const pagemark::error &error) {
        expect_true(line, error.status() == status && std::strstr(error.what(), said), error.what());
    }
}

#define THROWS(status, said, ...) expect_thrown(__LINE__, PAGEMARK_STATUS_##status, said, [&] { __VA_ARGS__; })
