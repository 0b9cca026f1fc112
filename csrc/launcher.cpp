#include "launcher.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <stdexcept>

#include "messages.h"

namespace paged_prefill {

void fail(Message message, std::initializer_list<std::pair<const char*, std::string>> values) {
  const MessageText& entry = message_texts[static_cast<int>(message)];
  std::string pattern = std::string(entry.text) + "\n" + entry.hint;
  std::string result;
  for (size_t at = 0; at < pattern.size();) {
    size_t end = pattern[at] == '{' ? pattern.find('}', at) : std::string::npos;
    if (end == std::string::npos) {
      result += pattern[at++];
      continue;
    }
    std::string name = pattern.substr(at + 1, end - at - 1);
    for (const auto& value : values) {
      if (name == value.first) result += value.second;
    }
    at = end + 1;
  }
  throw std::runtime_error(result);
}

namespace {

struct ArgumentField {
  const char* name;
  const char* type;
  size_t offset;
};

constexpr ArgumentField argument_fields[] = {
#define ARGUMENT_FIELD(type, tag, name) {#name, tag, offsetof(KernelArguments, name)},
    KERNEL_ARGUMENTS(ARGUMENT_FIELD)
#undef ARGUMENT_FIELD
};

struct Device {
  DriverDevice* driver;
  std::vector<std::unique_ptr<Variant>> variants;  // in order of preference
  std::atomic<const Variant*> last{nullptr};
};

// Read without a lock on every call; written under `open_lock`. Devices live as long as the process.
std::atomic<Device*> devices[max_devices];
DriverDevice* opened[max_devices];
std::mutex open_lock;

// A driver does not survive a fork. The child is told so by a flag, which a call reads for nothing; a process id would
// cost a system call each time.
std::atomic<bool> driver_used{false};
std::atomic<bool> forked{false};
void after_fork_in_child() { forked = driver_used.load(); }
const int fork_handler = pthread_atfork(nullptr, nullptr, after_fork_in_child);

void refuse_forked() {
  if (forked.load(std::memory_order_relaxed)) fail(Message::forked);
}

void check_ordinal(int ordinal) {
  refuse_forked();
  if (ordinal < 0 || ordinal >= max_devices) throw std::runtime_error("device ordinal out of range");
}

DriverDevice* open_driver(int ordinal) {
  python::GilReleased released;
  driver_used = true;
  std::lock_guard<std::mutex> lock(open_lock);
  if (!opened[ordinal]) {
    opened[ordinal] = (python::uses_hip() ? open_hip_device(ordinal) : open_cuda_device(ordinal)).release();
  }
  return opened[ordinal];
}

Device& find_device(int ordinal) {
  check_ordinal(ordinal);
  Device* known = devices[ordinal].load(std::memory_order_acquire);
  if (known) return *known;

  DriverDevice* driver = open_driver(ordinal);
  python::GilReleased released;
  auto device = std::make_unique<Device>();
  device->driver = driver;
  device->variants = python::describe(ordinal, driver->facts);  // takes the GIL, so not under the lock
  std::lock_guard<std::mutex> lock(open_lock);
  known = devices[ordinal].load(std::memory_order_acquire);
  if (known) return *known;
  known = device.release();
  devices[ordinal].store(known, std::memory_order_release);
  return *known;
}

// After a call has failed: a device whose context is gone is opened, and its images are loaded, by the next call. What
// the old one held is left to its context.
void forget_if_lost(int ordinal, const Device& device) {
  if (!device.driver->lost()) return;
  python::GilReleased released;
  std::lock_guard<std::mutex> lock(open_lock);
  if (opened[ordinal] != device.driver) return;
  opened[ordinal] = nullptr;
  devices[ordinal].store(nullptr);
}

// One thread reads and loads an image while the others wait; after a failure each of them tries for itself. The one
// that loads takes the GIL under the image's lock, which is safe because nobody waits for that lock with the GIL.
void* load(int ordinal, Device& device, Variant& variant) {
  python::GilReleased released;
  std::lock_guard<std::mutex> lock(variant.load_lock);
  if (void* function = variant.function.load()) return function;
  auto start = std::chrono::steady_clock::now();
  try {
    std::string bytes = python::read_image(ordinal, variant.image.id);
    variant.function.store(device.driver->load(variant.image, bytes), std::memory_order_release);
  } catch (...) {
    forget_if_lost(ordinal, device);
    throw;
  }
  std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  python::report_load(ordinal, variant.image.id, took.count());
  return variant.function.load();
}

[[noreturn]] void fail_no_variant(int ordinal, const Device& device, const Call& call) {
  std::string ids;
  for (const auto& variant : device.variants) ids += (ids.empty() ? "" : ", ") + variant->image.id;
  fail(Message::no_variant, {{"ordinal", std::to_string(ordinal)},
                             {"dtype", call.dtype},
                             {"heads", std::to_string(call.arguments.num_heads)},
                             {"head_dim", std::to_string(call.arguments.head_dim)},
                             {"variants", ids},
                             {"alignment", call.aligned ? "are" : "are not"}});
}

}  // namespace

void Variant::add_argument(const std::string& name, const std::string& type) {
  for (const ArgumentField& field : argument_fields) {
    if (name == field.name && type == field.type && offsets.size() < max_arguments) {
      offsets.push_back(field.offset);
      return;
    }
  }
  fail(Message::bad_argument, {{"variant", image.id}, {"argument", type + " " + name}});
}

bool Variant::accepts(const Call& call) const {
  const KernelArguments& arguments = call.arguments;
  return (head_dim == 0 || head_dim == arguments.head_dim) && min_heads <= arguments.num_heads &&
         arguments.num_heads <= max_heads && (call.aligned || !aligned) && dtype == call.dtype;
}

void launch(int ordinal, Call& call, void* stream) {
  Device& device = find_device(ordinal);
  auto chosen = std::find_if(device.variants.begin(), device.variants.end(),
                             [&](const auto& variant) { return variant->accepts(call); });
  if (chosen == device.variants.end()) fail_no_variant(ordinal, device, call);
  Variant& variant = **chosen;

  // Tiles are counted in 32 bits, with room for the stride of a persistent grid past the last one.
  constexpr int64_t limit = INT32_MAX - (1 << 20);
  int64_t head_tiles = (int64_t{call.arguments.num_heads} + variant.head_tile - 1) / variant.head_tile;
  if (call.num_tokens > limit / head_tiles) {
    fail(Message::num_tiles, {{"got", std::to_string(call.num_tokens) + " * " + std::to_string(head_tiles)},
                              {"head_tile", std::to_string(variant.head_tile)},
                              {"limit", std::to_string(limit)}});
  }
  int64_t tiles = call.num_tokens * head_tiles;
  call.arguments.num_tokens = static_cast<int32_t>(call.num_tokens);
  call.arguments.num_tiles = static_cast<int32_t>(tiles);

  void* function = variant.function.load(std::memory_order_acquire);
  if (!function) function = load(ordinal, device, variant);

  // The driver copies each argument from where it stands. Compiled kernels end with two scratch pointers, which are
  // null because no image needs scratch (the build asserts it).
  void* scratch = nullptr;
  void* values[max_arguments + 2];
  size_t count = 0;
  for (size_t offset : variant.offsets) values[count++] = reinterpret_cast<char*>(&call.arguments) + offset;
  values[count++] = &scratch;
  values[count++] = &scratch;

  int64_t step = variant.persistent ? tiles : device.driver->max_blocks(variant.image.threads);
  try {
    for (int64_t first = 0; first < tiles; first += step) {
      call.arguments.first_tile = static_cast<int32_t>(first);
      int64_t blocks = std::min(tiles - first, variant.persistent ? int64_t{device.driver->facts.processors} : step);
      device.driver->launch(function, variant.image, static_cast<unsigned>(blocks), stream, values);
    }
  } catch (...) {
    forget_if_lost(ordinal, device);
    throw;
  }
  device.last.store(&variant, std::memory_order_relaxed);
}

DeviceFacts device_facts(int ordinal) {
  check_ordinal(ordinal);
  return open_driver(ordinal)->facts;
}

void preload(int ordinal) {
  Device& device = find_device(ordinal);
  for (auto& variant : device.variants) {
    if (!variant->function.load(std::memory_order_acquire)) load(ordinal, device, *variant);
  }
}

std::vector<std::string> loaded(int ordinal) {
  std::vector<std::string> ids;
  Device* device = ordinal >= 0 && ordinal < max_devices ? devices[ordinal].load() : nullptr;
  if (!device) return ids;
  for (const auto& variant : device->variants) {
    if (variant->function.load()) ids.push_back(variant->image.id);
  }
  return ids;
}

std::string last_launch(int ordinal) {
  Device* device = ordinal >= 0 && ordinal < max_devices ? devices[ordinal].load() : nullptr;
  const Variant* variant = device ? device->last.load() : nullptr;
  return variant ? variant->image.id : "";
}

void reset(int ordinal) {
  if (ordinal >= 0 && ordinal < max_devices) devices[ordinal].store(nullptr);
}

}  // namespace paged_prefill
