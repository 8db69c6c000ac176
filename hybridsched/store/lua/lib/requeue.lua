-- Functions for --@include; no script by itself. Reads neither KEYS nor ARGV: keys come from its caller.
-- Returns nothing.
--
-- Put a claimed request back at the end of its queue: what was given up does not jump ahead of fresh work.
local function requeue(keys, entry, flat, attempt)
  local call = {'XADD', keys.stream, '*'}
  for i = 1, #flat, 2 do
    call[#call + 1] = flat[i]
    call[#call + 1] = flat[i] == 'attempt' and attempt or flat[i + 1]
  end
  local fresh = redis.call(unpack(call))
  redis.call('HSET', keys.req, 'entry', fresh, 'attempt', attempt)
  redis.call('XACK', keys.stream, 'workers', entry)
  redis.call('XDEL', keys.stream, entry)
end
