-- Send groups of tokens of running requests. Fenced like finish.lua. Several cost one call.
-- From its first group on a request is never run again: its client has seen part of the answer.
--
-- KEYS, three for each group: the request's hash, its stream, the reply stream that its entry names.
-- ARGV 1 consumer   2 life of a reply stream after this, ms   3 its MAXLEN
--   then five for each group: entry id, request id, attempt, number of the group (from 1), tok (JSON array).
-- Returns, for each group: 1 sent | 0 no longer the caller's | the reply stream to use instead.
--@include entries
--@include answer

local consumer, reply_ttl_ms, maxlen = ARGV[1], ARGV[2], ARGV[3]
local results = {}
for i = 0, #KEYS / 3 - 1 do
  local req, stream, reply = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
  local a = 3 + 5 * i
  if not held_by(stream, ARGV[a + 1], consumer, 0) then
    results[i + 1] = 0
  else
    local elsewhere = moved(req, reply)
    if elsewhere then
      results[i + 1] = elsewhere
    else
      if ARGV[a + 4] == '1' then
        redis.call('HSET', req, 'emitted', 1)
      end
      redis.call('XADD', reply, 'MAXLEN', '~', maxlen, '*', 'id', ARGV[a + 2], 'attempt', ARGV[a + 3],
        'n', ARGV[a + 4], 'tok', ARGV[a + 5])
      redis.call('PEXPIRE', reply, reply_ttl_ms)
      results[i + 1] = 1
    end
  end
end
return results
