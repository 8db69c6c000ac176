-- Functions for --@include after entries and answer; no script by itself. Reads neither KEYS nor ARGV: keys come
-- from its caller. Returns: see each function.
--
-- Until when somebody waits for a request: a repeat of its id may wait longer than its entry says.
local function deadline_of(req, flat)
  local first = tonumber(field(flat, 'deadline_ms') or '') or 0
  return math.max(first, tonumber(on_any_type('HGET', req, 'deadline_ms') or '') or 0)
end

-- Put a claimed request back at the end of its queue: what was given up does not jump ahead of fresh work.
local function requeue(keys, entry, flat, attempt)
  local renewed = {
    attempt = attempt, reply = table.concat(keys.replies, ' '),
    deadline_ms = string.format('%.3f', deadline_of(keys.req, flat)),
  }
  local call = {'XADD', keys.stream, '*'}
  for i = 1, #flat, 2 do
    call[#call + 1] = flat[i]
    call[#call + 1] = renewed[flat[i]] or flat[i + 1]
  end
  local fresh = redis.call(unpack(call))
  on_any_type('HSET', keys.req, 'entry', fresh, 'attempt', attempt)
  redis.call('XACK', keys.stream, 'workers', entry)
  redis.call('XDEL', keys.stream, entry)
end

-- Why a request that is given back must not run again, in this order: cancelled; past its deadline; its client has
-- seen tokens already. `left` ends the sentence of the last one: what the worker did. Returns the word and the
-- result to answer with; nil when it may run again.
local function ended(keys, flat, now, left)
  local marks = on_any_type('HMGET', keys.req, 'cancel', 'emitted') or {}
  if marks[1] then
    return 'cancelled', cancelled_result()
  elseif deadline_of(keys.req, flat) <= now then
    return 'expired', expired_result()
  elseif marks[2] then
    return 'failed', failure('failed', 'engine_lost',
      'the worker ' .. left .. ' after it had sent part of the answer; send the request again under a new id', 502)
  end
end
