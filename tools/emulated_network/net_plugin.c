/* An NCCL net plugin for emulated hosts: messages between the processes of one machine over shared memory, at a set
 * rate and latency.
 *
 * The receiver posts a receive in memory that both ends share. The sender takes the oldest posted receive with its tag,
 * and copies the message through a ring of chunks. When the sender takes a receive, it reserves size / rate in the
 * schedules of both hosts, which all their processes share. The receive completes at the end of its reservation plus
 * the latency, or when the bytes are there if the CPUs are slower. Each call of NCCL copies one chunk at most. A thread
 * per end copies if there are several chunks, because one thread alone is slower than a fast network, or if NCCL does
 * not call.
 *
 * The memory has no name (memfd), and travels over a Unix socket in the abstract namespace, so killed processes leave
 * nothing behind. The kernel closes the socket of a killed process, and its peer's calls then fail.
 *
 * Version 8 of the interface is the newest without virtual NICs, contexts of communicators and profiling, which this
 * plugin does not need. NCCL 2.28 accepts versions 6 to 11. The declarations below have the layout of
 * src/include/plugin/net/net_v8.h in https://github.com/NVIDIA/nccl. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* ---- the interface of NCCL ---- */

typedef enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5, REMOTE_ERROR = 6 } result;
typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

enum { LOG_WARN = 2, LOG_NET = 16, POINTER_HOST = 1, HANDLE_BYTES = 128, NUM_REQUESTS = 32 };

typedef struct {
  char *name, *pci_path;
  uint64_t guid;
  int pointers, registration_is_global;
  int mbits_per_s, port;
  float latency_us;
  int max_connections, max_grouped_receives, device_type, device_version;
} properties;

typedef struct {
  const char *name;
  result (*init)(logger);
  result (*devices)(int *count);
  result (*get_properties)(int device, properties *);
  result (*listen)(int device, void *handle, void **listener);
  result (*connect)(int device, void *handle, void **sender, void **device_handle);
  result (*accept)(void *listener, void **receiver, void **device_handle);
  result (*register_memory)(void *end, void *data, size_t size, int type, void **memory);
  result (*register_dma_buf)(void *end, void *data, size_t size, int type, uint64_t offset, int file, void **memory);
  result (*deregister_memory)(void *end, void *memory);
  result (*send)(void *sender, void *data, int size, int tag, void *memory, void **request);
  result (*receive)(void *receiver, int count, void **data, int *sizes, int *tags, void **memory, void **request);
  result (*flush)(void *receiver, int count, void **data, int *sizes, void **memory, void **request);
  result (*test)(void *request, int *done, int *sizes);
  result (*close_sender)(void *sender);
  result (*close_receiver)(void *receiver);
  result (*close_listener)(void *listener);
  result (*get_device_memory)(void *end, void *memory, void **device_memory);
  result (*receive_consumed)(void *receiver, int count, void *request);
} net_plugin_v8;

/* ---- the schedules of the hosts ---- */

enum { MAX_HOSTS = 1024 };

struct host {
  alignas(64) _Atomic uint64_t sends_until; /* nanoseconds of CLOCK_MONOTONIC */
  alignas(64) _Atomic uint64_t receives_until;
};

static struct {
  logger log;
  double bytes_per_ns;
  uint64_t latency_ns;
  int host;
  struct host *hosts; /* shared by all processes of all hosts */
} network;

#define FAIL(status, ...) \
  (network.log ? network.log(LOG_WARN, LOG_NET, __FILE__, __LINE__, "NET/Emulated: " __VA_ARGS__) : (void)0, status)

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Reserves `duration` after all earlier reservations, and returns its end. No process holds a lock that it could keep
 * when it is killed. */
static uint64_t reserve(_Atomic uint64_t *until, uint64_t now, uint64_t duration) {
  uint64_t old = atomic_load(until), end;
  do end = (old > now ? old : now) + duration;
  while (!atomic_compare_exchange_weak(until, &old, end));
  return end;
}

/* Reads a number from the environment. Returns -1 if it is missing or outside its range. */
static double number(const char *name, double least, double most) {
  const char *text = getenv(name);
  char *end = NULL;
  double value = text ? strtod(text, &end) : -1;
  return text && end != text && !*end && value >= least && value <= most ? value : -1;
}

static result plugin_init(logger log) {
  network.log = log;
  if (network.hosts) return SUCCESS; /* NCCL calls this function once per communicator */
  double gb_per_s = number("MEGABENCH_EMULATED_GB_PER_S", 0.001, 1e6);
  double latency_us = number("MEGABENCH_EMULATED_LATENCY_US", 0, 1e6);
  double host = number("MEGABENCH_EMULATED_HOST", 0, MAX_HOSTS - 1);
  const char *path = getenv("MEGABENCH_EMULATED_SCHEDULE");
  if (gb_per_s < 0 || latency_us < 0 || host < 0 || !path)
    return FAIL(INVALID_USAGE, "set MEGABENCH_EMULATED_GB_PER_S, MEGABENCH_EMULATED_LATENCY_US, "
                "MEGABENCH_EMULATED_HOST and MEGABENCH_EMULATED_SCHEDULE");
  size_t size = MAX_HOSTS * sizeof(struct host);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void *hosts = MAP_FAILED;
  if (file >= 0 && !ftruncate(file, (off_t)size)) hosts = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  int error = errno;
  if (file >= 0) close(file);
  if (hosts == MAP_FAILED) return FAIL(SYSTEM_ERROR, "cannot map the schedule %s: %s", path, strerror(error));
  network.bytes_per_ns = gb_per_s;
  network.latency_ns = (uint64_t)(latency_us * 1e3);
  network.host = (int)host;
  network.hosts = hosts;
  return SUCCESS;
}

static result plugin_devices(int *count) {
  *count = 1;
  return SUCCESS;
}

static result plugin_properties(int device, properties *found) {
  double mbits = network.bytes_per_ns * 8000;
  *found = (properties){
      .name = "emulated", .guid = (uint64_t)device, .pointers = POINTER_HOST, .registration_is_global = 1,
      .mbits_per_s = mbits > INT_MAX ? INT_MAX : mbits < 1 ? 1 : (int)mbits,
      .latency_us = (float)network.latency_ns / 1e3f, .max_connections = 65536, .max_grouped_receives = 1};
  return SUCCESS;
}

/* ---- connections ---- */

enum { CHUNK_BYTES = 128 << 10, NUM_CHUNKS = 16, WAKE_CHUNKS = 3, DOZE_NS = 1000000, CHECK_NS = 50000000 };
enum { FREE, POSTED, TAKEN };
enum { AWAKE, DOZING, ASLEEP };

/* A posted receive. The sender sets what follows `order`, before it sets the state TAKEN. */
struct slot {
  alignas(64) _Atomic int state;
  int tag;
  size_t capacity;
  uint64_t order;
  size_t size;
  uint64_t arrives_at;
};

/* The memory that the two ends of a connection share. */
struct ring {
  struct slot slots[NUM_REQUESTS];
  alignas(64) _Atomic uint64_t num_posted;
  alignas(64) _Atomic uint64_t num_written; /* chunks */
  alignas(64) _Atomic uint64_t num_read;
  alignas(64) struct { uint32_t slot, size; } chunks[NUM_CHUNKS];
  alignas(4096) char data[NUM_CHUNKS][CHUNK_BYTES];
};

struct request {
  struct end *end; /* NULL while the request is free */
  char *data;
  uint64_t order;
  uint32_t slot;
  size_t size, num_sent;
  uint64_t leaves_at;
  _Atomic size_t num_received;
};

struct end {
  int socket, peer_host, is_sender, is_peer_gone;
  struct ucred peer;
  uint64_t checked_at;
  struct ring *ring;
  struct request requests[NUM_REQUESTS];
  uint64_t oldest_posted;                /* of a sender: all receives before this one are taken */
  _Atomic uint64_t num_started, num_copied; /* of a sender: its requests, which it copies in order */
  pthread_mutex_t copying;
  pthread_t thread;
  sem_t wake;
  _Atomic int state, is_closing;
  _Atomic unsigned num_requests; /* which have not completed */
};

struct listener {
  int socket, accepted;
};

struct handle {
  int host;
  char name[64]; /* of an abstract Unix socket */
};

static socklen_t fill_address(struct sockaddr_un *address, const char *name) {
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  memcpy(address->sun_path + 1, name, strlen(name));
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

/* Copies one chunk of the oldest message into the ring. Returns whether there was one, and room for it. */
static int copy_in(struct end *end) {
  struct ring *ring = end->ring;
  uint64_t order;
  while ((order = atomic_load(&end->num_copied)) < atomic_load(&end->num_started)) {
    struct request *request = &end->requests[order % NUM_REQUESTS];
    size_t size = request->size - request->num_sent;
    if (!size) { /* an empty message */
      atomic_store(&end->num_copied, order + 1);
      continue;
    }
    uint64_t index = atomic_load(&ring->num_written);
    if (index - atomic_load(&ring->num_read) == NUM_CHUNKS) return 0;
    if (size > CHUNK_BYTES) size = CHUNK_BYTES;
    memcpy(ring->data[index % NUM_CHUNKS], request->data + request->num_sent, size);
    ring->chunks[index % NUM_CHUNKS].slot = request->slot;
    ring->chunks[index % NUM_CHUNKS].size = (uint32_t)size;
    request->num_sent += size;
    atomic_store(&ring->num_written, index + 1);
    if (request->num_sent == request->size) atomic_store(&end->num_copied, order + 1);
    return 1;
  }
  return 0;
}

/* Copies the oldest chunk of the ring to its receive. Returns whether there was one. */
static int copy_out(struct end *end) {
  struct ring *ring = end->ring;
  uint64_t index = atomic_load(&ring->num_read);
  if (index == atomic_load(&ring->num_written)) return 0;
  struct request *request = &end->requests[ring->chunks[index % NUM_CHUNKS].slot];
  size_t size = ring->chunks[index % NUM_CHUNKS].size;
  size_t offset = atomic_load(&request->num_received);
  memcpy(request->data + offset, ring->data[index % NUM_CHUNKS], size);
  atomic_store(&request->num_received, offset + size); /* first: whoever sees an empty ring has seen all bytes */
  atomic_store(&ring->num_read, index + 1);
  return 1;
}

static int copy_chunk(struct end *end) {
  pthread_mutex_lock(&end->copying);
  int copied = end->is_sender ? copy_in(end) : copy_out(end);
  pthread_mutex_unlock(&end->copying);
  return copied;
}

/* Copies while there are chunks. Then sleeps for a millisecond, or without requests until it is woken. */
static void *copy_many(void *given) {
  struct end *end = given;
  while (!atomic_load(&end->is_closing)) {
    if (copy_chunk(end)) continue;
    atomic_store(&end->state, ASLEEP);
    if (atomic_load(&end->num_requests)) {
      atomic_store(&end->state, DOZING);
      struct timespec until;
      clock_gettime(CLOCK_REALTIME, &until);
      until.tv_nsec += DOZE_NS;
      if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
      sem_timedwait(&end->wake, &until);
    } else {
      sem_wait(&end->wake);
    }
    atomic_store(&end->state, AWAKE);
  }
  return NULL;
}

static void wake(struct end *end, int deepest) {
  int state = atomic_load(&end->state);
  if (state >= deepest && atomic_compare_exchange_strong(&end->state, &state, AWAKE)) sem_post(&end->wake);
}

/* Copies a chunk unless the thread is copying, and wakes the thread if it can copy several more. */
static void progress(struct end *end) {
  if (pthread_mutex_trylock(&end->copying)) return;
  int copied = end->is_sender ? copy_in(end) : copy_out(end);
  pthread_mutex_unlock(&end->copying);
  if (!copied) return;
  uint64_t num_chunks = atomic_load(&end->ring->num_written) - atomic_load(&end->ring->num_read);
  if (end->is_sender) {
    uint64_t num_free = NUM_CHUNKS - num_chunks, order = atomic_load(&end->num_copied);
    for (num_chunks = 0; order < atomic_load(&end->num_started); order++)
      num_chunks += (end->requests[order % NUM_REQUESTS].size + CHUNK_BYTES - 1) / CHUNK_BYTES;
    if (num_chunks > num_free) num_chunks = num_free;
  }
  if (num_chunks >= WAKE_CHUNKS) wake(end, DOZING);
}

/* Counts a request that starts. The thread must not sleep for long while there is one. */
static void add_request(struct end *end) {
  atomic_fetch_add(&end->num_requests, 1);
  wake(end, ASLEEP);
}

/* Returns whether the peer has closed the connection or ended, by the last check. */
static int is_peer_gone(struct end *end, uint64_t now) {
  if (!end->is_peer_gone && now - end->checked_at > CHECK_NS) {
    char byte;
    ssize_t size = recv(end->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    end->is_peer_gone = !size || (size < 0 && errno != EAGAIN && errno != EINTR);
    /* processes that the peer has forked keep its socket open */
    if (kill(end->peer.pid, 0) && errno == ESRCH) end->is_peer_gone = 1;
    end->checked_at = now;
  }
  return end->is_peer_gone;
}

static void free_end(struct end *end) {
  if (end->ring) munmap(end->ring, sizeof(struct ring));
  close(end->socket);
  free(end);
}

/* Makes an end of a connected socket and the shared memory `memory`, and closes `memory`. On failure, closes both. */
static result open_end(int socket, int memory, int peer_host, int is_sender, void **opened) {
  struct end *end = calloc(1, sizeof *end);
  if (!end) abort();
  end->socket = socket;
  end->peer_host = peer_host;
  end->is_sender = is_sender;
  socklen_t size = sizeof end->peer;
  int error = getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &end->peer, &size) ? errno : 0;
  if (!error && end->peer.uid != geteuid()) error = EPERM;
  end->ring = mmap(NULL, sizeof(struct ring), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory, 0);
  if (!error && end->ring == MAP_FAILED) error = errno;
  close(memory);
  if (end->ring == MAP_FAILED) end->ring = NULL;
  pthread_mutex_init(&end->copying, NULL);
  sem_init(&end->wake, 0, 0);
  if (!error) {
    sigset_t all, old; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    error = pthread_create(&end->thread, NULL, copy_many, end);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
  }
  if (error) {
    free_end(end);
    return FAIL(SYSTEM_ERROR, "cannot open a connection: %s", strerror(error));
  }
  *opened = end;
  return SUCCESS;
}

static result close_end(void *given) {
  struct end *end = given;
  atomic_store(&end->is_closing, 1);
  sem_post(&end->wake);
  pthread_join(end->thread, NULL);
  free_end(end);
  return SUCCESS;
}

static result plugin_listen(int device, void *given, void **opened) {
  (void)device;
  static _Atomic unsigned count;
  struct sockaddr_un address;
  struct handle *handle = given;
  _Static_assert(sizeof *handle <= HANDLE_BYTES, "NCCL exchanges handles of this size");
  memset(handle, 0, HANDLE_BYTES);
  handle->host = network.host;
  snprintf(handle->name, sizeof handle->name, "megabench-%d-%u-%lx", getpid(), atomic_fetch_add(&count, 1),
           (unsigned long)now_ns());
  int file = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  socklen_t size = fill_address(&address, handle->name);
  if (file < 0 || bind(file, (struct sockaddr *)&address, size) || listen(file, 16)) {
    int error = errno;
    if (file >= 0) close(file);
    return FAIL(SYSTEM_ERROR, "cannot listen: %s", strerror(error));
  }
  struct listener *listener = malloc(sizeof *listener);
  if (!listener) abort();
  *listener = (struct listener){.socket = file, .accepted = -1};
  *opened = listener;
  return SUCCESS;
}

/* Sends one byte with the file of the shared memory. Returns 0, or -1 with errno. */
static int send_file(int socket, int file) {
  char byte = 0;
  alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec part = {&byte, 1};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(header), &file, sizeof file);
  return sendmsg(socket, &message, MSG_NOSIGNAL) == 1 ? 0 : -1;
}

/* Returns the file that `send_file` has sent, or -1 with errno. */
static int receive_file(int socket) {
  char byte;
  int file;
  alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec part = {&byte, 1};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  ssize_t size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (size < 0) return -1;
  errno = ECONNRESET;
  struct cmsghdr *header = size ? CMSG_FIRSTHDR(&message) : NULL;
  if (!header || header->cmsg_type != SCM_RIGHTS) return -1;
  memcpy(&file, CMSG_DATA(header), sizeof file);
  return file;
}

static result plugin_connect(int device, void *given, void **opened, void **device_handle) {
  (void)device, (void)device_handle;
  const struct handle *handle = given;
  struct sockaddr_un address;
  socklen_t size = fill_address(&address, handle->name);
  *opened = NULL;
  int memory = -1, file = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (file >= 0 && !connect(file, (struct sockaddr *)&address, size) &&
      (memory = memfd_create("megabench-network", MFD_CLOEXEC)) >= 0 &&
      !ftruncate(memory, sizeof(struct ring)) && !send_file(file, memory))
    return open_end(file, memory, handle->host, 1, opened);
  int error = errno;
  if (memory >= 0) close(memory);
  if (file >= 0) close(file);
  if (error == EAGAIN || error == EINTR) return SUCCESS; /* the listener's queue is full, so NCCL calls again */
  return FAIL(error == ECONNREFUSED ? REMOTE_ERROR : SYSTEM_ERROR, "cannot connect: %s", strerror(error));
}

static result plugin_accept(void *given, void **opened, void **device_handle) {
  (void)device_handle;
  struct listener *listener = given;
  *opened = NULL;
  if (listener->accepted < 0) listener->accepted = accept4(listener->socket, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  int memory = listener->accepted < 0 ? -1 : receive_file(listener->accepted);
  if (memory < 0)
    return errno == EAGAIN || errno == EINTR ? SUCCESS : FAIL(REMOTE_ERROR, "cannot accept: %s", strerror(errno));
  int file = listener->accepted;
  listener->accepted = -1;
  return open_end(file, memory, -1, 0, opened);
}

static result plugin_close_listener(void *given) {
  struct listener *listener = given;
  if (listener->accepted >= 0) close(listener->accepted);
  close(listener->socket);
  free(listener);
  return SUCCESS;
}

/* ---- messages ---- */

static result plugin_send(void *given, void *data, int size, int tag, void *memory, void **started) {
  (void)memory;
  struct end *end = given;
  struct ring *ring = end->ring;
  uint64_t now = now_ns(), num_started = atomic_load(&end->num_started), num_posted = atomic_load(&ring->num_posted);
  struct request *request = &end->requests[num_started % NUM_REQUESTS];
  *started = NULL;
  progress(end);
  if (request->end) return SUCCESS;
  for (uint64_t order = end->oldest_posted; order < num_posted; order++) {
    struct slot *slot = &ring->slots[order % NUM_REQUESTS];
    if (atomic_load(&slot->state) != POSTED || slot->order != order) {
      if (order == end->oldest_posted) end->oldest_posted++;
      continue;
    }
    if (slot->tag != tag) continue;
    if (size < 0 || (size_t)size > slot->capacity)
      return FAIL(INVALID_USAGE, "a message of %d bytes for a receive of %zu bytes", size, slot->capacity);
    uint64_t duration = (uint64_t)((double)size / network.bytes_per_ns + 0.5);
    uint64_t leaves_at = reserve(&network.hosts[network.host].sends_until, now, duration);
    uint64_t arrives_at = reserve(&network.hosts[end->peer_host].receives_until, now, duration);
    slot->size = (size_t)size;
    slot->arrives_at = (arrives_at > leaves_at ? arrives_at : leaves_at) + network.latency_ns;
    atomic_store(&slot->state, TAKEN);
    *request = (struct request){.end = end, .data = data, .order = num_started, .slot = order % NUM_REQUESTS,
                                .size = (size_t)size, .leaves_at = leaves_at};
    atomic_store(&end->num_started, num_started + 1);
    add_request(end);
    progress(end);
    *started = request;
    return SUCCESS;
  }
  return is_peer_gone(end, now) ? FAIL(REMOTE_ERROR, "the receiver has ended") : SUCCESS;
}

static result plugin_receive(void *given, int count, void **data, int *sizes, int *tags, void **memory,
                             void **started) {
  (void)memory;
  struct end *end = given;
  struct ring *ring = end->ring;
  uint64_t order = atomic_load(&ring->num_posted);
  struct request *request = &end->requests[order % NUM_REQUESTS];
  struct slot *slot = &ring->slots[order % NUM_REQUESTS];
  *started = NULL;
  if (count != 1 || sizes[0] < 0) return FAIL(INTERNAL_ERROR, "%d receives in one call", count);
  if (request->end) return SUCCESS;
  request->end = end;
  request->data = data[0];
  request->slot = order % NUM_REQUESTS;
  atomic_store(&request->num_received, 0);
  slot->tag = tags[0];
  slot->capacity = (size_t)sizes[0];
  slot->order = order;
  atomic_store(&slot->state, POSTED);
  atomic_store(&ring->num_posted, order + 1);
  add_request(end);
  *started = request;
  return SUCCESS;
}

static result plugin_test(void *given, int *done, int *sizes) {
  struct request *request = given;
  struct end *end = request->end;
  struct ring *ring = end->ring;
  struct slot *slot = &ring->slots[request->slot];
  uint64_t now = now_ns();
  int is_copied;
  size_t size = request->size;
  progress(end);
  if (end->is_sender) {
    is_copied = atomic_load(&end->num_copied) > request->order;
    *done = is_copied && now >= request->leaves_at;
  } else {
    is_copied = atomic_load(&slot->state) == TAKEN && atomic_load(&request->num_received) == slot->size;
    *done = is_copied && now >= slot->arrives_at;
    size = is_copied ? slot->size : 0;
  }
  if (*done) {
    if (sizes) sizes[0] = (int)size;
    if (!end->is_sender) atomic_store(&slot->state, FREE);
    request->end = NULL;
    atomic_fetch_sub(&end->num_requests, 1);
    return SUCCESS;
  }
  if (is_copied || !is_peer_gone(end, now)) return SUCCESS;
  /* what the sender wrote before it ended can still be received */
  if (!end->is_sender && atomic_load(&ring->num_read) != atomic_load(&ring->num_written)) return SUCCESS;
  if (!end->is_sender && atomic_load(&slot->state) == TAKEN && atomic_load(&request->num_received) == slot->size)
    return SUCCESS;
  return FAIL(REMOTE_ERROR, "the %s has ended", end->is_sender ? "receiver" : "sender");
}

/* ---- memory of the CPU needs no registration and no flush ---- */

static result plugin_register(void *end, void *data, size_t size, int type, void **memory) {
  (void)end, (void)data, (void)size;
  *memory = NULL;
  return type == POINTER_HOST ? SUCCESS : FAIL(INTERNAL_ERROR, "this plugin sends from the memory of the CPU only");
}

static result plugin_deregister(void *end, void *memory) {
  (void)end, (void)memory;
  return SUCCESS;
}

static result plugin_flush(void *receiver, int count, void **data, int *sizes, void **memory, void **request) {
  (void)receiver, (void)count, (void)data, (void)sizes, (void)memory;
  *request = NULL;
  return SUCCESS;
}

__attribute__((visibility("default"))) const net_plugin_v8 ncclNetPlugin_v8 = {
    .name = "Emulated", .init = plugin_init, .devices = plugin_devices, .get_properties = plugin_properties,
    .listen = plugin_listen, .connect = plugin_connect, .accept = plugin_accept, .register_memory = plugin_register,
    .deregister_memory = plugin_deregister, .send = plugin_send, .receive = plugin_receive, .flush = plugin_flush,
    .test = plugin_test, .close_sender = close_end, .close_receiver = close_end,
    .close_listener = plugin_close_listener};
