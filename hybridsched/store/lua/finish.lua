-- Answer requests for good. Fenced: only whoever still holds a request may end it. Several cost one call.
--
-- KEYS, three for each request: its hash, its stream, the reply stream that its entry names.
-- ARGV 1 consumer   2 how long the result is kept, ms   3 life of the reply stream after this, ms   4 its MAXLEN
--   then four for each request: entry id, request id, attempt, end (JSON).
-- Returns, for each request: 1 ended and answered | 0 no longer the caller's (nothing done) | the name of the
--   reply stream to use instead (a retry named another; nothing done, call again with it).
--@include entries
--@include answer

local consumer = ARGV[1]
local limits = {keep_ms = ARGV[2], reply_ttl_ms = ARGV[3], maxlen = ARGV[4]}
local results = {}
for i = 0, #KEYS / 3 - 1 do
  local keys = {req = KEYS[3 * i + 1], stream = KEYS[3 * i + 2], reply = KEYS[3 * i + 3]}
  local a = 4 + 4 * i
  if not held_by(keys.stream, ARGV[a + 1], consumer, 0) then
    results[i + 1] = 0
  else
    local elsewhere = moved(keys.req, keys.reply)
    if elsewhere then
      results[i + 1] = elsewhere
    else
      answer(keys, ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], limits)
      results[i + 1] = 1
    end
  end
end
return results
