-- Functions for --@include; no script by itself. Reads neither KEYS nor ARGV: keys come from its caller.
-- Returns: see each function.
--
-- The end of a request: off the stream, its result kept, its client told. Exactly one caller gets here,
-- because the entry leaves the stream in the same step.
local function answer(keys, entry, id, attempt, result, limits)
  redis.call('XACK', keys.stream, 'workers', entry)
  redis.call('XDEL', keys.stream, entry)
  redis.call('HSET', keys.req, 'state', 'done', 'result', result)
  redis.call('PEXPIRE', keys.req, limits.keep_ms)
  redis.call('XADD', keys.reply, 'MAXLEN', '~', limits.maxlen, '*', 'id', id, 'attempt', attempt, 'end', result)
  redis.call('PEXPIRE', keys.reply, limits.reply_ttl_ms)
end

-- The reply stream as it is now, when a retry has named another than `reply`; else nil.
local function moved(req, reply)
  local current = redis.call('HGET', req, 'reply')
  if current and current ~= reply then
    return current
  end
  return nil
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
