-- Functions for --@include; no script by itself. Reads neither KEYS nor ARGV: keys come from its caller.
-- Returns: see each function.

-- A command on a key that a client names. One that holds another type, or a stream that takes no more (its last id
-- is the highest there is), is as if it were not there: it must not fail the script, which answers others too.
local function on_any_type(...)
  local got = redis.pcall(...)
  if type(got) == 'table' and got.err then
    if string.find(got.err, '^WRONGTYPE') or string.find(got.err, '^ERR The [sI]') then
      return nil
    end
    error(got)
  end
  return got
end

-- A request's hash names, apart by spaces, the reply streams of all that wait for it (field `reply`) and until
-- when each of them waits (field `until`, in the same order).
local function words(text)
  local found = {}
  for word in string.gmatch(text or '', '%S+') do
    found[#found + 1] = word
  end
  return found
end

-- Whether `key` is a reply stream of the pool that the request's hash belongs to. Whoever names a stream could
-- otherwise have an answer written into, or a life put on, any key. Few streams take many answers: each is looked
-- at once in a call, and `hashes` keeps how the hashes of its pool begin.
local hashes = {}
local function is_reply(req, key)
  local begin = hashes[key]
  if begin == nil then
    local prefix = string.match(key, '^(hs:{[^{}]+}:)reply:[!-z|~]+$')
    begin = prefix and prefix .. 'req:' or false
    hashes[key] = begin
  end
  return begin and string.sub(req, 1, #begin) == begin
end

-- An entry on a reply stream of the request whose hash is `req`.
local function tell(req, reply, limits, ...)
  if is_reply(req, reply) and on_any_type('XADD', reply, 'MAXLEN', '~', limits.maxlen, '*', ...) then
    redis.call('PEXPIRE', reply, limits.reply_ttl_ms)
  end
end

-- The end of a request: off the stream, its result kept, all its clients told. Exactly one caller gets here,
-- because the entry leaves the stream in the same step. keys: req, stream, replies (a list). `groups`: how many
-- groups of tokens were sent, where the caller has read it.
local function answer(keys, entry, id, attempt, result, limits, groups)
  redis.call('XACK', keys.stream, 'workers', entry)
  redis.call('XDEL', keys.stream, entry)
  if on_any_type('HSET', keys.req, 'state', 'done', 'result', result) then
    redis.call('PEXPIRE', keys.req, limits.keep_ms)
  end
  groups = groups or on_any_type('HGET', keys.req, 'emitted') or '0'
  for _, reply in ipairs(keys.replies) do
    tell(keys.req, reply, limits, 'id', id, 'attempt', attempt, 'groups', groups, 'end', result)
  end
end

-- The reply streams as they are now, apart by spaces, when they are not `replies` (a repeat came, or one who waited
-- has left); else nil. And, second, how many groups of tokens were sent.
local function moved(req, replies)
  local found = on_any_type('HMGET', req, 'reply', 'emitted') or {}
  local current = found[1]
  if current and current ~= '' and current ~= (replies[2] and table.concat(replies, ' ') or replies[1]) then
    return current
  end
  return nil, found[2] or '0'
end

local function failure(status, code, message, http_status)
  return cjson.encode({
    status = status, code = code, message = message, finish_reason = cjson.null, usage = cjson.null,
    body = cjson.null, http_status = http_status, replica = cjson.null,
  })
end

local function expired_result()
  return failure('expired', 'deadline_exceeded', 'the deadline passed before the request could run', 504)
end

local function cancelled_result()
  return failure('cancelled', 'cancelled', 'the request was cancelled', 499)
end
