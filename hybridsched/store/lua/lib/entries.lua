-- Functions for --@include; no script by itself. Reads neither KEYS nor ARGV: keys come from its caller.
-- Returns: see each function.
--
-- Entries of an online stream: flat lists {name, value, name, value, ...}.
local GROUP = 'workers'

local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then
      return flat[i + 1]
    end
  end
  return nil
end

-- Whether `owner` holds `entry`, unacknowledged, and has not renewed it for `idle_ms` (0: however fresh).
local function held_by(stream, entry, owner, idle_ms)
  local held
  if idle_ms > 0 then
    held = redis.pcall('XPENDING', stream, GROUP, 'IDLE', idle_ms, entry, entry, 1, owner)
  else
    held = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1, owner)
  end
  return held.err == nil and #held > 0
end

local function make_group(stream)
  redis.pcall('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
end

-- How many entries the stream has; nil: the key is of another type, so nothing can be accepted there or claimed.
local function length_of(stream)
  local length = redis.pcall('XLEN', stream)
  if type(length) == 'number' then
    return length
  end
  if not string.find(length.err, '^WRONGTYPE') then
    error(length)
  end
  return nil
end

-- How many entries of the stream nobody has claimed. Claimed ones stay in the stream until they end.
local function unclaimed(stream)
  local length = length_of(stream)
  if not length or length == 0 then
    return 0
  end
  local pending = redis.pcall('XPENDING', stream, GROUP)
  if pending.err then
    return length
  end
  return length - pending[1]
end

-- The oldest unclaimed entry {id, flat fields}, or nil.
local function head(stream)
  local last = '0-0'
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then
    return nil
  end
  for _, group in ipairs(groups) do
    if field(group, 'name') == GROUP then
      last = field(group, 'last-delivered-id')
    end
  end
  return redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
end
