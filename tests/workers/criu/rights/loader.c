/* Takes the place of a prefix's loader: runs the real one, which loads limits.so first. */
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int count, char **words) {
    static char loader[256], limits[256];
    char *argv[count + 3];
    const char *folder = dirname(strdup(words[0]));
    snprintf(loader, sizeof loader, "%s/loader.so", folder);
    snprintf(limits, sizeof limits, "%s/limits.so", folder);
    argv[0] = loader, argv[1] = "--preload", argv[2] = limits;
    memcpy(argv + 3, words + 1, count * sizeof *words);
    execv(loader, argv);
    return 127;
}
