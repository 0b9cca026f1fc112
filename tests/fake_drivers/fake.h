// What the fake drivers share: a log of calls that the test reads, and failures that it asks for.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ARGUMENTS 64

static pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
static char* log_text;
static size_t log_size, log_capacity;
static char failing_call[128];
static int failing_countdown, failing_code;
static int argument_count, argument_sizes[MAX_ARGUMENTS];
static int quiet;
static _Thread_local int capturing, capture_mode;

static void record(const char* format, ...) {
  if (quiet) return;
  char line[4096];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&fake_lock);
  if (log_size + length + 2 > log_capacity) {
    log_capacity = 2 * log_capacity + length + 4096;
    log_text = realloc(log_text, log_capacity);
  }
  memcpy(log_text + log_size, line, length);
  log_size += length;
  log_text[log_size++] = '\n';
  log_text[log_size] = 0;
  pthread_mutex_unlock(&fake_lock);
}

// The code with which this call is to fail, 0 if it is not.
static int failure_of(const char* call) {
  int code = 0;
  pthread_mutex_lock(&fake_lock);
  if (failing_code && !strcmp(call, failing_call) && --failing_countdown == 0) {
    code = failing_code;
    failing_code = 0;
  }
  pthread_mutex_unlock(&fake_lock);
  return code;
}

// The nth of the following calls of that name fails with `code`, once.
void fake_fail(const char* call, int nth, int code) {
  pthread_mutex_lock(&fake_lock);
  snprintf(failing_call, sizeof failing_call, "%s", call);
  failing_countdown = nth;
  failing_code = code;
  pthread_mutex_unlock(&fake_lock);
}

// Sizes of a kernel's arguments in bytes, as the launch logs them.
void fake_arguments(int count, const int* sizes) {
  argument_count = count;
  memcpy(argument_sizes, sizes, count * sizeof *sizes);
}

// The calling thread captures a stream: loading is forbidden but in the relaxed mode (2), as with real drivers.
void fake_capture(int on) { capturing = on; }
int fake_capture_mode(void) { return capture_mode; }

// Without a log a call costs what it costs, which timings need.
void fake_quiet(int on) { quiet = on; }

const char* fake_log(void) { return log_text ? log_text : ""; }
void fake_clear_log(void) {
  log_size = 0;
  if (log_text) *log_text = 0;
}

static const char* hex_arguments(void** values, char* text) {
  char* at = text;
  if (quiet) return text;
  for (int i = 0; i < argument_count; i++) {
    if (i) *at++ = ',';
    for (int b = 0; b < argument_sizes[i]; b++) at += sprintf(at, "%02x", ((unsigned char*)values[i])[b]);
  }
  *at = 0;
  return text;
}
