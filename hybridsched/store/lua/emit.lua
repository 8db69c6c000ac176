-- Send groups of tokens of running requests. Fenced like finish.lua. Several cost one call.
-- From its first group on a request is never run again: its clients have seen part of the answer.
--
-- KEYS, for each group: the request's hash, its stream, its reply streams.
-- ARGV 1 consumer   2 life of a reply stream after this, ms   3 its MAXLEN
--   then six for each group: entry id, request id, attempt, number of its reply streams, number of the group (from
--   1), tok (JSON array).
-- Returns, for each group: 1 sent | 0 no longer the caller's | the reply streams to use instead, apart by spaces
--   (a repeat came, or one who waited has left; nothing done, call again with them).
--@include entries
--@include answer

local consumer, limits = ARGV[1], {reply_ttl_ms = ARGV[2], maxlen = ARGV[3]}
local results, k = {}, 1
for a = 3, #ARGV - 1, 6 do
  local req, stream, replies = KEYS[k], KEYS[k + 1], {}
  for i = 1, tonumber(ARGV[a + 4]) do
    replies[i] = KEYS[k + 1 + i]
  end
  k = k + 2 + #replies
  if not held_by(stream, ARGV[a + 1], consumer, 0) then
    results[#results + 1] = 0
  else
    local elsewhere = moved(req, replies)
    if elsewhere then
      results[#results + 1] = elsewhere
    else
      on_any_type('HSET', req, 'emitted', ARGV[a + 5])
      for _, reply in ipairs(replies) do
        tell(req, reply, limits, 'id', ARGV[a + 2], 'attempt', ARGV[a + 3], 'n', ARGV[a + 5], 'tok', ARGV[a + 6])
      end
      results[#results + 1] = 1
    end
  end
end
return results
